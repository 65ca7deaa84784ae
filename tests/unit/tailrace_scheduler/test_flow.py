"""Episodes from their group to a server: starts, turns that ask, servers that fail, leave and join."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from tailrace.config import RunConfig
from tailrace_protos.control import (
    AgentActivity,
    EpisodeState,
    LeaseReport,
    LeaseRequest,
    ServerState,
)
from tailrace_protos.episode import EnvTask, EpisodeTask
from tailrace_protos.event import StepFinished
from tailrace_scheduler.config import SchedulerConfig
from tailrace_scheduler.core.decisions import BeginGroups, PublishEpisode
from tailrace_scheduler.core.flow import EpisodeFlow
from tailrace_scheduler.core.streaming import RETOLD_S
from tailrace_scheduler.core.streams.decisions import ProbeServer
from tailrace_scheduler.ports import GroupPlan
from tests.unit.tailrace_scheduler.simulation import made_settlement, made_status

LIMIT = 1000  # tokens of the longest episode


class Table:
    """A flow with servers that have room for so many episodes (an even number), and one worker."""

    def __init__(self, *servers: str, room: int = 2, group_size: int = 4, **keys: float) -> None:
        run = msgspec.convert({"exp_name": "x", "group_size": group_size}, RunConfig)
        config = msgspec.convert({"tags": ["A"], **keys}, SchedulerConfig)
        self.flow = EpisodeFlow(run, config)
        self.servers, self.room, self.group_size = servers, room, group_size
        self.now_s = 1000.0
        self.probes: list[str] = []
        self.tasks: dict[str, EpisodeTask] = {}
        self.tell_activity()
        self.beat()

    def tell_activity(self, **most: Any) -> None:
        activity = AgentActivity("w", 0, 0, 0, 0, 0.0, context_limit=LIMIT, max_episodes=most)
        self.flow.on_activity(activity, self.now_s)

    def beat(self, *servers: str, state: ServerState = ServerState.READY) -> None:
        for server_id in servers or self.servers:
            status = made_status(server_id, 0, self.now_s, state)
            # No server gets more than twice the episodes that it runs at once.
            status = msgspec.structs.replace(status, max_running=self.room // 2)
            self.flow.on_status(status, self.now_s)

    def plan(self, group_id: str = "t1") -> GroupPlan:
        return GroupPlan(
            group_id=group_id,
            group_index=1,
            phase="train",
            tasks=(EnvTask("A", 1),) * self.group_size,
            deadline_unix_s=self.now_s + 600,
            timeout_s=600.0,
            min_valid=2,
            step=0,
        )

    def open(self, group_id: str = "t1") -> dict[str, str]:
        assert self.flow.open(self.plan(group_id), self.now_s)
        return self.decide()

    def decide(self, after_s: float = 0.0) -> dict[str, str]:
        """Returns the servers of the episodes that start."""
        self.now_s += after_s
        decided = self.flow.decide(self.now_s)
        self.probes += [one.server_id for one in decided if isinstance(one, ProbeServer)]
        started = [one.task for one in decided if isinstance(one, PublishEpisode)]
        self.tasks |= {task.episode_id: task for task in started}
        return {task.episode_id: task.lease.server_id for task in started if task.lease}

    def ask(self, *episodes: str, failed: str = "", context: int = LIMIT) -> dict[str, str]:
        contexts = (context,) * len(episodes)
        request = LeaseRequest("w", episodes, contexts, failed)
        reply = self.flow.lease(request, self.now_s)
        assert len(reply.leases) == len(episodes) or reply.retry_after_s > 0
        return {lease.episode_id: lease.server_id for lease in reply.leases}

    def end(self, episode_id: str) -> None:
        group_id, _, member = episode_id.rpartition(".")
        body = msgspec.structs.replace(made_settlement(group_id, int(member)), context_tokens=LIMIT)
        self.flow.apply(body)
        self.flow.feed.apply(body, self.now_s)

    def report(self, **news: Any) -> None:
        self.flow.on_lease_report(LeaseReport("w", **news), self.now_s)


def test_episodes_start_when_a_server_has_room_and_the_rest_waits_unpublished() -> None:
    table = Table("a", "b", group_size=6)
    assert Counter(table.open().values()) == {"a": 2, "b": 2}
    table.now_s += 100.0
    table.beat()
    assert table.decide() == {}
    assert table.flow.groups.num_unsettled("train") == 4
    first = table.tasks["t1.0"].lease
    assert first is not None
    table.end("t1.0")
    assert table.decide() == {"t1.4": first.server_id}
    assert table.tasks["t1.4"].deadline_unix_s == table.now_s + 600, "its time begins now"


def test_a_task_tells_how_long_no_server_had_room_for_it() -> None:
    table = Table("a", group_size=3)
    assert set(table.open()) == {"t1.0", "t1.1"}
    table.now_s += 4.0
    table.beat()
    assert table.open("t2") == {}
    for seconds, ended, started in ((6.0, "t1.0", "t1.2"), (1.0, "t1.1", "t2.0")):
        table.now_s += seconds
        table.beat()
        table.end(ended)
        assert set(table.decide()) == {started}
    waits = {episode_id: task.room_wait_s for episode_id, task in table.tasks.items()}
    assert waits == {"t1.0": 0.0, "t1.1": 0.0, "t1.2": 10.0, "t2.0": 7.0}


def test_a_wait_for_workers_is_none_for_room() -> None:
    table = Table("a", room=20, group_size=12)
    table.tell_activity(train=1, eval=0)
    assert len(table.open()) == 1 + 8
    for num_episodes, started in ((2, {"t1.9"}), (64, {"t1.10", "t1.11"})):
        table.now_s += 10.0
        table.beat()
        table.tell_activity(train=num_episodes, eval=0)
        assert set(table.decide()) == started
    assert {task.room_wait_s for task in table.tasks.values()} == {0.0}


@pytest.mark.parametrize(("newest_policy_version", "begun_step"), [(0, 3), (1, 2)])
def test_the_age_of_a_group_counts_from_the_weights_that_its_first_server_has(
    newest_policy_version: int, begun_step: int
) -> None:
    table = Table("a")  # its weights are version 0
    table.flow.feed.apply(StepFinished("L", 3, newest_policy_version, (), 0, 0.0, 0.0, {}), table.now_s)
    table.flow.admit(9, newest_policy_version, table.now_s)
    assert table.flow.open(table.plan(), table.now_s)
    assert BeginGroups((("t1", begun_step),)) in table.flow.decide(table.now_s)


def test_no_more_starts_than_workers_can_play_and_soon_take() -> None:
    table = Table("a", room=1000, group_size=50)
    table.tell_activity(train=16, eval=0)
    assert len(table.open()) == 16 + 8
    assert table.decide() == {}
    table.end("t1.1")
    assert list(table.decide()) == ["t1.24"]


def test_evaluation_episodes_that_wait_for_workers_do_not_hold_up_training() -> None:
    table = Table("a", room=1000, group_size=12)
    table.tell_activity(train=64, eval=1)
    evaluation = msgspec.structs.replace(table.plan("e0-v0.00000"), phase="eval")
    assert table.flow.open(evaluation, table.now_s)
    assert len(table.decide()) == 1 + 8
    assert len(table.open("t1")) == 12
    table.end("e0-v0.00000.0")
    assert list(table.decide()) == ["e0-v0.00000.9"]


def test_turns_of_a_failed_server_go_on_while_the_rest_of_their_group_waits_for_workers() -> None:
    table = Table("a", "b", room=1000, group_size=12)
    table.tell_activity(train=1, eval=0)
    started = table.open()
    assert len(started) == 1 + 8
    at_a = [episode_id for episode_id, server_id in started.items() if server_id == "a"]
    assert at_a
    assert table.ask(*at_a, failed="a") == dict.fromkeys(at_a, "b")


def test_a_server_that_was_started_anew_begins_with_a_clean_history() -> None:
    table = Table("a")
    table.report(failures={"a": 5})
    assert table.open() == {}
    table.now_s += 1.0
    status = made_status("a", 0, table.now_s, incarnation="new")
    table.flow.on_status(status, table.now_s)
    assert set(table.decide().values()) == {"a"}


def test_the_oldest_group_starts_first() -> None:
    table = Table("a", group_size=3)
    order = [*table.open("t1"), *table.open("t2")]
    for _ in range(4):
        table.end(order[-1])
        order += table.decide()
    assert order == ["t1.0", "t1.1", "t1.2", "t2.0", "t2.1", "t2.2"]


def test_a_released_place_is_free_before_the_episode_is_settled() -> None:
    table = Table("a")
    table.open()
    table.report(states=(EpisodeState("t1.0", "a", 50, False),))
    assert table.decide() == {}
    table.report(released=("t1.0",))
    assert table.decide() == {"t1.2": "a"}


def test_a_turn_that_asks_stays_where_its_place_is() -> None:
    table = Table("a", "b")
    servers = table.open()
    assert table.ask(*servers) == servers


def test_an_episode_whose_server_failed_it_goes_elsewhere_or_back_where_there_is_no_elsewhere() -> None:
    table = Table("a", "b", room=4)
    episode, server = next(iter(table.open().items()))
    other = {"a": "b", "b": "a"}[server]
    assert table.ask(episode, failed=server) == {episode: other}
    alone = Table("a", room=4)
    alone.open()
    assert alone.ask("t1.0", failed="a") == {"t1.0": "a"}


def test_a_turn_without_room_waits_and_is_answered_when_it_asks_again() -> None:
    table = Table("a", "b")
    servers = table.open()
    lost = next(one for one, server in servers.items() if server == "a")
    kept = next(one for one, server in servers.items() if server == "b")
    table.now_s += 10.0  # a falls silent
    table.beat("b")
    assert table.decide() == {}
    for _ in range(2):
        assert table.ask(lost, failed="a") == {}
    table.end(kept)
    table.decide()
    assert table.ask(lost, failed="a") == {lost: "b"}


def test_a_server_that_fails_gets_nothing_until_a_probe_succeeds() -> None:
    table = Table("a", "b", room=20)
    table.report(failures={"a": 5})
    assert set(table.open("t1").values()) == {"b"}
    table.decide(2.0)
    assert table.probes == ["a"]
    table.flow.feed.probed("a", False, table.now_s)
    for _ in range(15):
        table.beat()
        table.decide(1.0)
    assert table.probes == ["a", "a"]
    assert set(table.open("t2").values()) == {"b"}
    table.flow.feed.probed("a", True, table.now_s)
    assert "a" in table.open("t3").values()


def test_a_few_failures_among_many_successes_suspend_nobody() -> None:
    table = Table("a")
    table.report(failures={"a": 5}, successes={"a": 95})
    table.report(failures={"a": 4})
    assert set(table.open().values()) == {"a"}


def test_a_server_that_joins_is_filled_and_one_that_leaves_is_emptied() -> None:
    table = Table("a")
    assert len(table.open()) == 2
    table.servers = ("a", "b")
    table.beat()
    assert list(table.decide().values()) == ["b", "b"]
    table.now_s += 1.0
    table.beat("b")
    table.beat("a", state=ServerState.DRAINING)
    table.open("t2")
    assert "a" not in table.decide().values()
    assert table.ask("t1.0", failed="a") == {}, "b is full"
    table.end("t1.2")
    table.end("t1.3")
    table.decide()
    assert set(table.ask("t1.0", "t1.1", failed="a").values()) == {"b"}


def test_a_server_whose_weights_lag_keeps_its_episodes_and_gets_none_until_it_has_caught_up() -> None:
    table = Table("a", "b", room=20)
    servers = table.open("t1")
    at_a = next(one for one, server in servers.items() if server == "a")

    def serve(**versions: int) -> None:
        table.now_s += 1.0
        for server_id, version in versions.items():
            table.flow.on_status(made_status(server_id, version, table.now_s), table.now_s)

    serve(a=7, b=10)
    assert set(table.open("t2").values()) == {"b"}
    assert table.ask(at_a) == {at_a: "a"}, "its episode moved"
    serve(a=8, b=10)
    assert "a" in table.open("t3").values()


def test_an_episode_of_no_open_group_gets_a_server_at_once() -> None:
    table = Table("a", "b")
    table.open()
    assert set(table.ask("session.0", "session.1").values()) == {"a", "b"}
    assert table.ask("session.0", failed="a") == {"session.0": "b"}


def test_sessions_are_not_all_sent_to_a_server_that_has_just_joined() -> None:
    table = Table("a", "b")
    table.ask(*(f"early.{number}" for number in range(40)))
    table.servers = ("a", "b", "c")
    table.beat()
    found = table.ask(*(f"late.{number}" for number in range(12)))
    assert Counter(found.values()) == {"a": 4, "b": 4, "c": 4}


@pytest.mark.parametrize("ask_after_s", [3.0, 60.0])
def test_a_lease_says_after_which_time_its_turns_ask(ask_after_s: float) -> None:
    table = Table("a", ask_after_s=ask_after_s)
    table.open()
    lease = table.tasks["t1.0"].lease
    assert lease is not None
    assert lease.ask_after_s == ask_after_s


def test_a_new_scheduler_publishes_only_what_the_queue_lacks_and_only_after_workers_told_it() -> None:
    old, new = Table("a", "b", group_size=6), Table("a", "b", group_size=6)
    servers = old.open()
    new.flow.adopt([old.plan()], old.tasks.values(), 0, new.now_s)
    assert new.decide() == {}, "workers may play any of them anywhere"
    new.report(states=tuple(EpisodeState(one, at, 50, True) for one, at in servers.items()))
    assert new.decide() == {}
    assert new.flow.groups.num_unsettled("train") == 4
    new.end("t1.1")
    assert new.decide() == {"t1.4": servers["t1.1"]}


def test_a_new_scheduler_waits_for_silent_workers_only_so_long() -> None:
    old, new = Table("a", group_size=6), Table("a", group_size=6)
    old.open()
    new.flow.adopt([old.plan()], old.tasks.values(), 0, new.now_s)
    assert new.decide(RETOLD_S - 0.1) == {}
    assert new.decide(0.2) == {"t1.2": "a", "t1.3": "a"}


def test_the_time_of_open_groups_begins_anew_after_a_stop_longer_than_it() -> None:
    old, new = Table("a", group_size=4), Table("a", group_size=4)
    old.open()
    new.now_s += 3600.0
    new.flow.adopt([old.plan()], old.tasks.values(), 0, new.now_s)
    assert new.flow.groups.due(new.now_s + 599.0) == []
