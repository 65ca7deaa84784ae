"""The core under any interleaving of events: turns, faults, duplicates, restarts, learner."""

from collections import Counter

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tailrace_scheduler.core.streams import decisions as de
from tailrace_scheduler.core.streams import events as ev
from tailrace_scheduler.core.streams import ledger
from tailrace_scheduler.core.streams.core import StreamCore
from tailrace_scheduler.core.streams.lengths import NUM_BUCKETS
from tailrace_scheduler.core.streams.settings import EngineModel, StreamSettings

SERVERS = ("a", "b", "c")
ONCE = (ev.GroupOpened, ev.GroupComplete, ev.EpisodeEnded, ev.GroupsTaken, ev.StepDone)
pick = st.integers(0, 10_000)


class FakeCluster(RuleBasedStateMachine):
    """A cluster that carries out every decision and remembers what is true."""

    @initialize(
        staleness=st.integers(0, 2),
        policy=st.sampled_from(["mask", "drop", "wait", "close", "auto"]),
        kv=st.sampled_from([6_000, 60_000]),
    )
    def begin(self, staleness: int, policy: str, kv: int) -> None:
        self.settings = StreamSettings(
            max_staleness=staleness,
            groups_per_step=2,
            policy=policy,  # type: ignore[arg-type]
            context_limit=4_096,
            engine=EngineModel(kv_tokens=kv, max_running=8),
        )
        self.now_s, self.step, self.trained, self.num_groups = 0.0, 0, 0, 0
        self.groups: dict[str, dict[int, str]] = {}  # open: member -> "wait", "run", "tool", "ask"
        self.valid: Counter[str] = Counter()
        self.first: dict[str, int] = {}  # step of the first start
        self.where: dict[str, str] = {}
        self.context: dict[str, int] = {}
        self.ready: list[str] = []
        self.taken: list[str] = []
        self.closed: Counter[tuple[str, int]] = Counter()
        self.up = set(SERVERS)
        self.barred: frozenset[str] = frozenset()
        self.events: list[ev.Event] = []
        self.restart()

    def tell(self, event: ev.Event) -> None:
        self.events.append(event)
        self.core.on(event, self.now_s)
        self.carry_out()

    def carry_out(self) -> None:
        for decision in self.core.decide(self.now_s):
            self.do(decision)

    def do(self, decision: de.Decision) -> None:
        match decision:
            case de.AdmitGroups(num_groups=count):
                for _ in range(count):
                    self.open_group()
            case de.StartEpisode(episode_id=one, server_id=server):
                group, member = self.split(one)
                assert (server in self.up, self.groups[group][member]) == (True, "wait")
                assert server not in self.barred
                self.groups[group][member] = "run"
                self.where[one], self.context[one] = server, 100
                self.first.setdefault(group, self.step)
            case de.ContinueTurn(episode_id=one, server_id=server):
                group, member = self.split(one)
                assert (server in self.up, self.groups[group][member]) == (True, "ask")
                self.groups[group][member], self.where[one] = "run", server
            case de.CloseGroup(group_id=group, members=members):
                for member in members:
                    self.closed[group, member] += 1
                    self.settle(group, member, is_valid=False)
            case de.DropGroup(group_id=group):
                self.groups.pop(group, None)
                if group in self.ready:
                    self.ready.remove(group)
                self.tell(ev.GroupsDropped((group,)))

    def split(self, episode_id: str) -> tuple[str, int]:
        group, _, member = episode_id.rpartition(".")
        return group, int(member)

    def open_group(self) -> None:
        group = f"g{self.num_groups}"
        self.num_groups += 1
        self.groups[group] = dict.fromkeys(range(3), "wait")
        self.tell(ev.GroupOpened(group, 3, "task", 100, min_valid=2))

    def settle(self, group: str, member: int, is_valid: bool) -> None:
        members = self.groups.get(group)
        if members is None or member not in members:
            return
        del members[member]
        self.valid[group] += is_valid
        one = f"{group}.{member}"
        self.where.pop(one, None)
        self.tell(ev.EpisodeEnded(one, is_valid, self.context.pop(one, 0), finished=is_valid))
        if not members and group in self.groups:
            del self.groups[group]
            if self.valid[group] >= 2:
                self.ready.append(group)
            self.tell(ev.GroupComplete(group, self.valid[group], 10))

    def episodes(self, *states: str) -> list[str]:
        return [
            f"{group}.{member}"
            for group, members in self.groups.items()
            for member, state in members.items()
            if state in states
        ]

    @rule(seconds=st.floats(0.01, 30.0))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        for server in sorted(self.up):
            self.report(server)
        self.carry_out()

    def report(self, server: str) -> None:
        here = sum(one == server for one in self.where.values())
        self.tell(
            ev.ServerReport(
                server,
                num_running=here,
                kv_used_tokens=200 * here,
                step_s=0.01 if here else 0.0,
                policy_version=self.step,
            )
        )

    @rule(which=pick, tokens=st.integers(1, 900), waits_s=st.floats(0.1, 200.0), fails=st.booleans())
    def a_turn_ends(self, which: int, tokens: int, waits_s: float, fails: bool) -> None:
        running = self.episodes("run")
        if not running:
            return
        one = running[which % len(running)]
        group, member = self.split(one)
        self.context[one] += tokens
        if fails:
            self.groups[group][member] = "ask"
            self.tell(ev.CallsReported(self.where[one], 1, 0))
            self.tell(ev.TurnAsked(one, self.context[one], self.where[one], failed=True))
            return
        self.tell(ev.CallsReported(self.where[one], 0, 1))
        self.groups[group][member] = "tool"
        self.tell(ev.TurnEnded(one, self.context[one]))
        self.tell(ev.ToolStarted(one))

    @rule(which=pick, cached=st.integers(0, 900))
    def a_tool_ends(self, which: int, cached: int) -> None:
        waiting = self.episodes("tool")
        if waiting:
            one = waiting[which % len(waiting)]
            group, member = self.split(one)
            self.groups[group][member] = "ask"
            self.tell(ev.TurnAsked(one, self.context[one] + 5, self.where[one], cached))

    @rule(which=pick, is_valid=st.booleans())
    def an_episode_ends(self, which: int, is_valid: bool) -> None:
        running = self.episodes("run")
        if running:
            self.settle(*self.split(running[which % len(running)]), is_valid)

    @rule(which=pick)
    def an_episode_is_handed_to_another_worker(self, which: int) -> None:
        found = self.episodes("run", "tool")
        if found:
            one = found[which % len(found)]
            group, member = self.split(one)
            self.groups[group][member] = "ask"
            self.tell(ev.EpisodeReleased(one))
            self.tell(ev.TurnAsked(one, self.context[one]))

    @rule(servers=st.frozensets(st.sampled_from(SERVERS)))
    def servers_are_barred(self, servers: frozenset[str]) -> None:
        self.barred = servers
        self.tell(ev.ServersBarred(servers))

    @rule(tokens=st.sampled_from([2_048, 4_096]))
    def workers_tell_the_longest_episode(self, tokens: int) -> None:
        self.tell(ev.ContextLimited(tokens))

    @rule(server=st.sampled_from(SERVERS), leaves=st.booleans())
    def a_server_goes(self, server: str, leaves: bool) -> None:
        self.up.discard(server)
        self.tell(ev.ServerLeaving(server) if leaves else ev.ServerGone(server))
        if not leaves:
            self.lose_turns(server)

    def lose_turns(self, server: str) -> None:
        for one in self.episodes("run"):
            if self.where[one] == server:
                group, member = self.split(one)
                self.groups[group][member] = "ask"
                self.tell(ev.TurnAsked(one, self.context[one], server, failed=True))

    @rule(server=st.sampled_from(SERVERS))
    def a_server_has_left(self, server: str) -> None:
        if server not in self.up:
            self.tell(ev.ServerGone(server))
            self.lose_turns(server)

    @rule(server=st.sampled_from(SERVERS))
    def a_server_joins(self, server: str) -> None:
        self.up.add(server)
        self.report(server)

    @rule()
    def probes_succeed(self) -> None:
        for server in sorted(self.up):
            self.tell(ev.CallsReported(server, 0, 3))

    @rule()
    def the_learner_takes(self) -> None:
        chosen = self.core.select(self.now_s, 2 - len(self.taken))
        for group in chosen:
            assert group in self.ready
            if self.settings.policy in ("wait", "drop") and group in self.first:
                assert self.step - self.first[group] <= self.settings.max_staleness
            self.ready.remove(group)
            self.taken.append(group)
        self.tell(ev.GroupsTaken(tuple(chosen)))
        if len(self.taken) == 2:
            self.taken.clear()
            self.step += 1
            self.trained += 2
            for server in sorted(self.up):
                self.report(server)
            self.tell(ev.StepDone(self.step, 1000))

    @rule(which=pick)
    def an_event_comes_again(self, which: int) -> None:
        if not self.events:
            return
        event = self.events[-1 - which % min(len(self.events), 20)]
        if isinstance(event, ONCE):
            self.tell(event)

    @rule()
    def restart(self) -> None:
        self.core, self.barred = StreamCore(self.settings), frozenset()
        self.events = []  # nobody tells a new scheduler of groups that ended before it began
        core, now_s = self.core, self.now_s
        core.on(ev.AdmissionBounded(1 << 40, self.step), now_s)
        for server in sorted(self.up):
            core.on(ev.ServerReport(server, policy_version=self.step), now_s)
        if self.step:
            core.on(ev.StepDone(self.step), now_s)
        for group in [*self.taken, *self.ready]:
            version = self.first.get(group, self.step)
            core.on(ev.GroupOpened(group, 3, "task", 100, min_valid=2, version=version), now_s)
            core.on(ev.GroupComplete(group, 3, 10), now_s)
        core.on(ev.GroupsTaken(tuple(self.taken)), now_s)
        for group, members in self.groups.items():
            self.tell_open(group, members)
        self.carry_out()

    def tell_open(self, group: str, members: dict[int, str]) -> None:
        settled = tuple(one for one in range(3) if one not in members)
        held = tuple(one for one, state in members.items() if state != "wait")
        opened = ev.GroupOpened(
            group,
            3,
            "task",
            100,
            min_valid=2,
            version=self.first.get(group, -1),
            settled=settled,
            num_valid=self.valid[group],
            held=held,
        )
        self.core.on(opened, self.now_s)
        for member in held:
            one = f"{group}.{member}"
            state, server = members[member], self.where.get(one, "")
            if state == "ask":
                self.core.on(ev.TurnAsked(one, self.context[one], server, failed=True), self.now_s)
            else:
                tool = state == "tool"
                self.core.on(ev.EpisodeHeld(one, server, self.context[one], tool), self.now_s)

    @invariant()
    def the_credit_is_never_exceeded(self) -> None:
        if not hasattr(self, "core"):
            return
        bound = (self.settings.max_staleness + self.step + 1) * self.settings.groups_per_step
        assert self.trained + len(self.taken) + len(self.ready) + len(self.groups) <= bound

    @invariant()
    def a_member_is_ended_early_once(self) -> None:
        assert all(count == 1 for count in getattr(self, "closed", {}).values())

    @invariant()
    def the_ledger_equals_a_recount(self) -> None:
        if not hasattr(self, "core"):
            return
        book = self.core.book
        for server in book.servers.servers.values():
            counts, fresh = server.counts.get("task"), ledger.recount(server).get("task")
            empty = np.zeros(NUM_BUCKETS)
            assert np.array_equal(
                empty if counts is None else counts, empty if fresh is None else fresh
            )
            assert server.num_live == (0 if fresh is None else fresh.sum())
            expected = 0.0 if fresh is None else fresh @ book.lengths_of("task").peak_table
            assert np.allclose(server.peak, expected, atol=1e-3)

    def teardown(self) -> None:
        """Nothing starves: with all servers up and no more faults, everything waiting is placed."""
        if not hasattr(self, "core"):
            return
        self.up = set(SERVERS)
        self.servers_are_barred(frozenset())
        for _ in range(200):
            waiting = self.episodes("wait", "ask")
            if not waiting:
                return
            self.probes_succeed()
            self.time_passes(10.0)
            for one in self.episodes("run", "tool"):
                self.settle(*self.split(one), True)
        raise AssertionError(f"{len(waiting)} episodes starve, such as {waiting[0]}")


FakeCluster.TestCase.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
TestAnyInterleaving = FakeCluster.TestCase
