"""Feed of `StreamCore` with messages and events, and its decisions as those of a run.

The core says which episode starts and on which server, where the next turn of an episode is played,
how many groups are admitted, and which of them close at the staleness horizon. Turns of a leaving
server end there, and go on elsewhere when they ask; members of closing groups are stopped by their
settlement.
"""

import math
from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from tailrace.config import RunConfig
from tailrace_protos.control import EpisodeState, LeaseReport, LeaseRequest, ServerState, ServerStatus
from tailrace_protos.episode import Outcome
from tailrace_protos.event import EpisodeSettled, EventBody, GroupClosed, GroupDropped, StepFinished
from tailrace_protos.subjects import PHASES, Phase
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.decisions import DeferGroups, SettleMembers
from tailrace_scheduler.core.groups import OpenGroup
from tailrace_scheduler.core.lineage import NONE_WAITING, WaitingGroups
from tailrace_scheduler.core.streams import decisions as de
from tailrace_scheduler.core.streams import events as ev
from tailrace_scheduler.core.streams.core import StreamCore
from tailrace_scheduler.core.streams.credit import WEIGHTS
from tailrace_scheduler.core.streams.settings import StreamSettings

PROMPT_TOKENS = 512  # expected at the start of an episode, unless it may not be four times as long
REPORT_S = 1.0  # least time between two reports of a server that go to the core
RETOLD_S = 2.0  # a new scheduler waits so long for workers to tell of the episodes that they play

StreamDecision = de.StartEpisode | SettleMembers | DeferGroups | de.ProbeServer


class StreamFeed:
    """Feeds one run's `StreamCore`."""

    def __init__(self, run: RunConfig, config: SchedulerConfig) -> None:
        self.closes_early = run.stale_groups in ("close", "auto")
        self._settings = StreamSettings(
            max_staleness=run.max_staleness,
            groups_per_step=run.groups_per_step,
            policy=run.stale_groups,
            max_waste=config.max_waste,
            max_steps=run.max_steps,
            max_buffered_groups=config.max_buffered_groups,
            max_buffered_bytes=config.max_buffered_bytes,
        )
        self._group_size = run.group_size
        self._bounds: ev.AdmissionBounded | None = None  # as the core knows them
        self._num_admitted = 0  # groups not fetched yet
        self.blocked_by = WEIGHTS
        """Bound that withholds admission; empty: none does."""
        self._limit_told = 0  # by workers
        self._ask_after_s = config.ask_after_s
        self._core = self._made_core()
        self._statuses: dict[str, tuple[float, ServerStatus]] = {}  # as the core knows them
        self._barred: frozenset[str] = frozenset()
        self._rooms: dict[Phase, int] = {}
        self._decided: list[StreamDecision] = []  # not fetched yet
        self._granted: dict[str, str] = {}  # server of each turn that waits for an answer, by episode
        self._given = 0  # turns of episodes of no open group
        self._last_given: dict[str, int] = {}  # the newest of these, by server
        self._retold_s = 0.0  # until then the episodes that workers play may be unknown

    def begin(
        self,
        step: int,
        groups: Iterable[OpenGroup],
        now_s: float,
        waiting: WaitingGroups = NONE_WAITING,
    ) -> None:
        """Begin anew at a step of the learner: after a restart, and when the learner went back."""
        self._settings = replace(self._settings, group_bytes=waiting.mean_bytes)
        before, self._core = self._core.book, self._made_core()
        self._bounds, self._num_admitted = None, 0
        statuses, self._statuses, self._barred = self._statuses, {}, frozenset()
        for _, status in statuses.values():
            self.heard(status, now_s)
        self._core.on(ev.StepDone(step), now_s)
        for group_id, num_bytes in waiting.sizes.items():
            self._complete(group_id, self._group_size, num_bytes, now_s)
        is_retold = True
        for group in groups:
            self.opened(group, now_s)
            is_retold &= not group.outstanding
        for episode in before.episodes.values():
            if episode.server is not None:
                context, server_id = int(episode.context), episode.server.server_id
                is_in_tool = episode.state == "tool"
                self._core.on(ev.EpisodeHeld(episode.episode_id, server_id, context, is_in_tool), now_s)
                is_retold = True
        self._retold_s = 0.0 if is_retold else now_s + RETOLD_S

    def opened(self, group: OpenGroup, now_s: float) -> None:
        """A group was admitted, or found open."""
        plan = group.plan
        event = ev.GroupOpened(
            plan.group_id,
            len(plan.tasks),
            plan.tasks[0].env_name,
            min(PROMPT_TOKENS, self._settings.context_limit // 4),
            plan.phase,
            plan.min_valid,
            plan.begun_step,
            settled=tuple(group.settled),
            num_valid=group.num_valid,
            held=group.outstanding,
        )
        self._core.on(event, now_s)

    def apply(self, body: EventBody, now_s: float) -> None:
        """Take an event of the run."""
        match body:
            case EpisodeSettled(episode_id=episode_id, outcome=outcome, context_tokens=context):
                is_whole = outcome is not Outcome.CANCELLED
                self._core.on(ev.EpisodeEnded(episode_id, outcome.is_valid, context, is_whole), now_s)
                self._granted.pop(episode_id, None)
            case GroupClosed(sent_to_learner=True, group_id=group_id):
                self._complete(group_id, body.num_valid, body.num_bytes, now_s)
            case GroupClosed(group_id=group_id):
                self._core.on(ev.GroupComplete(group_id, 0), now_s)
            case GroupDropped(group_id=group_id):
                self._core.on(ev.GroupsDropped((group_id,)), now_s)
            case StepFinished(step=step, group_ids=group_ids, metrics=metrics):
                self._core.on(ev.GroupsTaken(group_ids), now_s)
                num_trained = int(metrics.get("num_trained_tokens") or 0)
                self._core.on(ev.StepDone(step, num_trained), now_s)

    def _complete(self, group_id: str, num_valid: int, num_bytes: int, now_s: float) -> None:
        """A group waits for the learner, also one that closed before this scheduler knew it."""
        if group_id not in self._core.book.groups:
            ended = tuple(range(self._group_size))
            found = ev.GroupOpened(
                group_id, self._group_size, "", 0, settled=ended, num_valid=num_valid
            )
            self._core.on(found, now_s)
        self._core.on(ev.GroupComplete(group_id, num_valid, num_bytes), now_s)

    # Admission.

    def bound(self, last_step: int, newest_policy_version: int, now_s: float) -> None:
        """Admit no group for a step after this one; the newest weights have this version."""
        bounds = ev.AdmissionBounded(last_step, newest_policy_version)
        if bounds != self._bounds:
            self._bounds = bounds
            self._core.on(bounds, now_s)

    def admit(self) -> int:
        """Return the training groups to open now."""
        if (decided := self._core.admit()) is not None:
            self._take(decided)
        num_admitted, self._num_admitted = self._num_admitted, 0
        return num_admitted

    # Episodes.

    def limited(self, context_tokens: int, now_s: float) -> None:
        """A worker told of the longest episode that it plays; the longest of all counts."""
        if context_tokens > self._limit_told:
            self._limit_told = context_tokens
            self._settings = replace(self._settings, context_limit=context_tokens)
            self._core.on(ev.ContextLimited(context_tokens), now_s)

    # Turns.

    def lease(self, request: LeaseRequest, now_s: float) -> dict[str, str]:
        """Server of each episode of the request whose next turn does not have to wait, by episode."""
        for episode_id, context in zip(request.episode_ids, request.context_tokens, strict=True):
            if self._server_of(episode_id) != self._granted.get(episode_id, ""):
                self._granted.pop(episode_id, None)  # that server is gone since
            if episode_id not in self._granted:
                self._ask(episode_id, context, request.failed_server_id, now_s)
        self._step(now_s)
        found = {one: self._granted.pop(one, "") for one in request.episode_ids}
        for episode_id in found:
            if episode_id not in self._core.book.episodes:
                found[episode_id] = self._anywhere(request.failed_server_id)
        return {episode_id: server_id for episode_id, server_id in found.items() if server_id}

    def _ask(self, episode_id: str, context: int, failed_server_id: str, now_s: float) -> None:
        """Ask the core; a turn that has been moved from the failed server already stays where it is."""
        if not context and (episode := self._core.book.episodes.get(episode_id)):
            context = int(episode.context)
        has_failed = failed_server_id != "" and self._server_of(episode_id) in ("", failed_server_id)
        event = ev.TurnAsked(episode_id, context, failed_server_id, failed=has_failed)
        self._core.on(event, now_s)

    def _server_of(self, episode_id: str) -> str:
        episode = self._core.book.episodes.get(episode_id)
        return episode.server.server_id if episode and episode.server else ""

    def _anywhere(self, avoid: str) -> str:
        """A server for an episode of no open group (a session without a run, or a settled one): in turn
        where all are alike."""
        usable = [one for one in self._core.book.servers.servers.values() if one.is_usable]
        elsewhere = [one for one in usable if one.server_id != avoid] or usable
        if not elsewhere:
            return ""
        last = self._last_given
        found = min(elsewhere, key=lambda one: (one.num_live / one.speed, last.get(one.server_id, 0)))
        self._given += 1
        last[found.server_id] = self._given
        return found.server_id

    def released(self, episode_ids: Iterable[str], now_s: float) -> None:
        """The workers of these episodes play no further turn of them."""
        for episode_id in episode_ids:
            self._granted.pop(episode_id, None)
            self._core.on(ev.EpisodeReleased(episode_id), now_s)

    def told(self, report: LeaseReport, now_s: float) -> None:
        """Take the states of a worker's episodes, and the ends of its calls."""
        for state in report.states:
            self._state(state, now_s)
        for server_id in {*report.failures, *report.successes}:
            failures, successes = report.failures.get(server_id, 0), report.successes.get(server_id, 0)
            self._core.on(ev.CallsReported(server_id, failures, successes), now_s)

    def _state(self, state: EpisodeState, now_s: float) -> None:
        context = state.context_tokens or min(PROMPT_TOKENS, self._settings.context_limit // 4)
        self._core.on(ev.EpisodeHeld(state.episode_id, state.server_id, context), now_s)
        if not state.is_waiting:
            self._core.on(ev.ToolEnded(state.episode_id, context), now_s)
            return
        if state.context_tokens:
            self._core.on(ev.TurnEnded(state.episode_id, context), now_s)
        self._core.on(ev.ToolStarted(state.episode_id), now_s)

    # Servers.

    @property
    def suspended(self) -> list[str]:
        """Servers that get nothing until a probe succeeds."""
        servers = self._core.book.servers.servers.values()
        return [one.server_id for one in servers if one.calls.on_probation]

    def heard(self, status: ServerStatus, now_s: float) -> None:
        """Take a heartbeat of a server that is READY or drains."""
        if status.state is ServerState.DRAINING:
            self._core.on(ev.ServerLeaving(status.server_id), now_s)
            return
        told_s, before = self._statuses.get(status.server_id, (-math.inf, None))
        if before is not None and before.incarnation != status.incarnation:
            self._core.on(ev.ServerGone(status.server_id), now_s)
            before = None
        has_news = before is None or before.policy_version != status.policy_version
        if not has_news and now_s - told_s < REPORT_S:
            return
        self._statuses[status.server_id] = (now_s, status)
        self._core.on(_report(status, before), now_s)

    def probed(self, server_id: str, succeeded: bool, now_s: float) -> None:
        """A probe ended."""
        self._core.on(ev.CallsReported(server_id, int(not succeeded), int(succeeded)), now_s)

    def use_servers(self, present: Collection[str], barred: Collection[str], now_s: float) -> None:
        """Servers that are not `present` are gone, and those `barred` get nothing new for now."""
        for server_id in self._statuses.keys() - set(present):
            del self._statuses[server_id]
            self._last_given.pop(server_id, None)
            self._core.on(ev.ServerGone(server_id), now_s)
        if frozenset(barred) != self._barred:
            self._barred = frozenset(barred)
            self._core.on(ev.ServersBarred(self._barred), now_s)

    def learner_waits(self, num_places: int) -> None:
        """The learner's step lacks so many groups, and it may take none of those that are closed."""
        self._core.book.ages.blocked_slots = num_places

    # Decisions.

    def decide(self, rooms: Mapping[Phase, int], now_s: float) -> list[StreamDecision]:
        """Return what is to be done since the last time.

        `rooms`: episodes of a phase that workers can take now; a phase not named has no bound.
        """
        self._rooms = dict(rooms)
        self._step(now_s)
        decided, self._decided = self._decided, []
        return decided

    def begun_step(self, group_id: str) -> int:
        """Return the step of the weights that an open group began with; -1: nothing was sampled."""
        return self._core.book.groups[group_id].version

    def _step(self, now_s: float) -> None:
        book = self._core.book
        due = {group.group_id: group.version for group in book.ages.due(is_open=True)}
        for one in self._core.decide(now_s, self._rooms_now(now_s)):
            self._take(one)
        known = ((book.groups.get(group_id), version) for group_id, version in due.items())
        later = [
            (group.group_id, group.version)
            for group, version in known
            if group and group.version > version
        ]
        if later:
            self._decided.append(DeferGroups(tuple(later)))

    def _take(self, one: de.Decision) -> None:
        match one:
            case de.AdmitGroups(num_groups=num_groups, blocked_by=blocked_by):
                self._num_admitted += num_groups
                self.blocked_by = blocked_by
            case de.StartEpisode():
                self._decided.append(one)
                phase = self._core.book.episodes[one.episode_id].group.phase
                if phase in self._rooms:
                    self._rooms[phase] -= 1
            case de.ContinueTurn(episode_id=episode_id, server_id=server_id):
                self._granted[episode_id] = server_id
            case de.CloseGroup(group_id=group_id, members=members, reason=reason):
                self._decided.append(SettleMembers(group_id, members, Outcome.CANCELLED, reason))
            case de.DropGroup(group_id=group_id, members=members) if members:
                reason = "its oldest tokens are older than max_staleness"
                self._decided.append(SettleMembers(group_id, members, Outcome.CANCELLED, reason))
            case de.ProbeServer():
                self._decided.append(one)

    def _rooms_now(self, now_s: float) -> dict[Phase, int]:
        if now_s >= self._retold_s:
            return self._rooms
        if not any(group.absent for group in self._core.book.groups.values()):
            self._retold_s = 0.0
            return self._rooms
        return dict.fromkeys(PHASES, 0)

    def _made_core(self) -> StreamCore:
        core = StreamCore(self._settings)
        core.book.placement.ask_after_s = self._ask_after_s
        return core


def _report(status: ServerStatus, before: ServerStatus | None) -> ev.ServerReport:
    num_steps = status.num_steps - (before.num_steps if before else 0)
    step_s = status.step_s - (before.step_s if before else 0.0)
    recomputed = status.num_recomputed_tokens - (before.num_recomputed_tokens if before else 0)
    preempted = status.num_preemptions - (before.num_preemptions if before else 0)
    elapsed_s = status.heartbeat_unix_s - before.heartbeat_unix_s if before else 0.0
    return ev.ServerReport(
        status.server_id,
        status.incarnation,
        status.used_tokens,
        status.capacity_tokens,
        status.host_capacity_tokens,
        status.num_running,
        status.num_waiting,
        step_s / num_steps if num_steps > 0 else 0.0,
        max(preempted, 0),
        max(recomputed, 0),
        status.max_running,
        status.policy_version,
        decode_share=min(step_s / elapsed_s, 1.0) if elapsed_s > 0 else 1.0,
        releases_prefixes=status.releases_prefixes,
    )
