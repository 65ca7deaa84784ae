"""Leases: where episodes go, how long they stay, and what failing servers get."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace_protos.control import LeaseReport, LeaseRequest, ServerState
from tailrace_scheduler.core.health import FIRST_SUSPENSION_S, ServerHealth
from tailrace_scheduler.core.placement import Placement
from tests.unit.tailrace_scheduler.simulation import made_status


class Table:
    """A placement over servers whose heartbeats come with the time asked for."""

    def __init__(self, *server_ids: str) -> None:
        self.server_ids = server_ids
        self.health = ServerHealth(server_timeout_s=5.0)
        self.placement = Placement(self.health, lease_ttl_s=10.0)
        self.beat(0.0)

    def beat(self, now_s: float, *server_ids: str) -> None:
        for server_id in server_ids or self.server_ids:
            self.health.heard(made_status(server_id, heartbeat_unix_s=now_s), now_s)

    def lease(
        self, *episodes: str, tokens: int = 100, now_s: float = 0.0, failed: str = "", worker: str = "w"
    ) -> list[str]:
        request = LeaseRequest(worker, episodes, (tokens,) * len(episodes), failed)
        return [lease.server_id for lease in self.placement.lease(request, now_s).leases]


def test_new_episodes_go_where_the_outstanding_tokens_are_least() -> None:
    table = Table("a", "b")
    assert table.lease("1", tokens=1000) == ["a"]
    assert table.lease("2", "3", "4", tokens=300) == ["b", "b", "b"]
    assert table.lease("5", tokens=300) == ["b"]
    assert table.lease("6", tokens=300) == ["a"]


def test_a_lease_sticks_and_is_counted_once() -> None:
    table = Table("a", "b")
    table.lease("1")
    table.lease("2", tokens=1)
    assert table.lease("1", tokens=500) == ["a"]
    assert table.placement.outstanding_tokens("a") == 500
    assert table.placement.num_leases == 2


def test_an_episode_whose_server_failed_it_goes_elsewhere_or_back_where_there_is_no_elsewhere() -> None:
    table = Table("a", "b")
    assert table.lease("1") == ["a"]
    assert table.lease("1", failed="a") == ["b"]
    alone = Table("a")
    alone.lease("1")
    assert alone.lease("1", failed="a") == ["a"]


def test_released_tokens_are_free_again() -> None:
    table = Table("a")
    table.lease("1", "2")
    table.placement.report(LeaseReport("w", ("1",)), 0.0)
    assert table.placement.outstanding_tokens("a") == 100
    table.placement.release("2")
    table.placement.release("2")
    assert table.placement.outstanding_tokens("a") == 0


def test_a_late_release_of_a_worker_that_lost_the_episode_changes_nothing() -> None:
    table = Table("a")
    table.lease("1", worker="old")
    table.lease("1", worker="new")
    table.placement.report(LeaseReport("old", ("1",)), 0.0)
    assert table.placement.holds("1")


def test_leases_of_a_silent_worker_expire() -> None:
    table = Table("a")
    table.lease("1", worker="silent")
    table.lease("2", worker="alive")
    table.placement.heard("alive", 9.0)
    assert table.placement.expire(10.5) == ["1"]
    assert table.placement.holds("2")
    assert table.placement.outstanding_tokens("a") == 100


def test_a_server_without_heartbeat_and_one_that_drains_get_nothing() -> None:
    table = Table("a", "b", "c")
    table.beat(6.0, "b")
    draining = made_status("c", heartbeat_unix_s=6.0, state=ServerState.DRAINING)
    table.health.heard(draining, 6.0)
    assert set(table.lease("1", "2", "3", now_s=6.0)) == {"b"}


def test_an_old_registry_entry_is_no_heartbeat() -> None:
    health = ServerHealth(5.0)
    health.heard(made_status("a", heartbeat_unix_s=100.0), 1000.0)
    assert not health.is_alive("a", 1000.0)
    health.heard(made_status("a", heartbeat_unix_s=100.5), 1001.0)
    assert health.is_alive("a", 1001.0)


def test_without_a_healthy_server_the_reply_says_when_to_ask_again() -> None:
    table = Table()
    reply = table.placement.lease(LeaseRequest("w", ("1",), (5,)), 0.0)
    assert reply.leases == ()
    assert reply.retry_after_s > 0


def test_a_server_that_fails_fast_attracts_no_traffic() -> None:
    table = Table("broken", "fine")
    placed: Counter[str] = Counter()
    for number in range(400):
        now_s = number * 0.05
        table.beat(now_s)
        episode = str(number)
        [server_id] = table.lease(episode, now_s=now_s)
        placed[server_id] += 1
        if server_id == "broken":  # answers at once, with an error: it never has anything outstanding
            table.placement.report(LeaseReport("w", (episode,), {"broken": 1}), now_s)
        elif number % 10 == 0:
            done = tuple(str(one) for one in range(number - 9, number + 1))
            table.placement.report(LeaseReport("w", done, {}, {"fine": 10}), now_s)
    assert placed["broken"] <= 15


def test_a_suspended_server_comes_back_on_probation_and_is_trusted_after_a_success() -> None:
    table = Table("a", "b")
    table.placement.report(LeaseReport("w", (), {"a": 5}), 0.0)
    assert set(table.lease("1", "2", "3", now_s=0.1)) == {"b"}
    later_s = FIRST_SUSPENSION_S + 0.1
    table.beat(later_s)
    on_probation = table.lease(*map(str, range(10, 20)), tokens=1, now_s=later_s)
    assert Counter(on_probation)["a"] == 2
    table.placement.report(LeaseReport("w", (), {}, {"a": 1}), later_s)
    assert Counter(table.lease(*map(str, range(20, 40)), tokens=1, now_s=later_s))["a"] > 2


def test_the_only_server_on_probation_still_gets_a_whole_batch() -> None:
    table = Table("a")
    table.placement.report(LeaseReport("w", (), {"a": 5}), 0.0)
    assert table.lease("1", now_s=0.5) == []
    table.beat(2.0)
    assert len(table.lease(*map(str, range(50)), now_s=2.0)) == 50


def test_a_few_failures_among_many_successes_suspend_nobody() -> None:
    table = Table("a")
    table.placement.report(LeaseReport("w", (), {"a": 5}, {"a": 95}), 0.0)
    table.placement.report(LeaseReport("w", (), {"a": 4}), 0.0)
    assert table.lease("1") == ["a"]


ACTIONS = st.tuples(
    st.sampled_from(["lease", "release", "report", "settle", "wait", "fail"]),
    st.integers(0, 8),
    st.sampled_from(["v", "w"]),
    st.sampled_from(["a", "b"]),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(ACTIONS, max_size=60))
def test_outstanding_tokens_are_always_those_of_the_leases_held(
    actions: list[tuple[str, int, str, str]],
) -> None:
    table = Table("a", "b")
    tokens: dict[str, int] = {}
    now_s = 0.0
    for kind, number, worker, server in actions:
        episode = str(number)
        table.beat(now_s)
        if kind in ("lease", "fail"):
            asked = 10 + number
            failed = server if kind == "fail" else ""
            if table.lease(episode, tokens=asked, now_s=now_s, failed=failed, worker=worker):
                tokens[episode] = asked
        elif kind == "release":
            table.placement.report(LeaseReport(worker, (episode,)), now_s)
        elif kind == "report":
            table.placement.report(LeaseReport(worker, (), {server: number}, {server: 1}), now_s)
        elif kind == "settle":
            table.placement.release(episode)
        else:
            now_s += number
            table.placement.expire(now_s)
        tokens = {name: held for name, held in tokens.items() if table.placement.holds(name)}
        total = sum(table.placement.outstanding_tokens(one) for one in ("a", "b"))
        assert total == sum(tokens.values())
        assert table.placement.num_leases == len(tokens)


def test_a_failed_call_counts_once_although_its_episode_asks_for_another_server() -> None:
    table = Table("a", "b")
    table.lease("1", "2")
    table.lease("1", failed="a")
    assert table.health.record("a").failures == 0.0  # to be refused by a full server is no failure
    table.placement.report(LeaseReport("w", (), {"a": 1}), 0.0)
    assert table.health.record("a").failures == 1.0
