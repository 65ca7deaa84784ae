"""Bounds of admission, each with a situation in which it alone decides."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace_scheduler.core.streams.credit import StalenessCredit
from tailrace_scheduler.core.streams.decisions import AdmitGroups
from tailrace_scheduler.core.streams.events import AdmissionBounded
from tailrace_scheduler.core.streams.records import StreamServer
from tailrace_scheduler.core.streams.settings import EngineModel, StreamSettings

FAR = 1 << 40  # a step that no run reaches


def made_credit(max_staleness: int = 2, *, step: int = 0, **bounds: Any) -> StalenessCredit:
    """Ten groups a step, after `step` steps, with weights of version 5."""
    credit = StalenessCredit(StreamSettings(max_staleness=max_staleness, groups_per_step=10, **bounds))
    credit.stepped(step)
    credit.bounded(AdmissionBounded(FAR, 5))
    return credit


def hold(credit: StalenessCredit, running: int = 0, waiting: int = 0, num_bytes: int = 0) -> None:
    """Let so many groups run, and so many wait for the learner."""
    for number in range(running + waiting):
        credit.opened(f"g{number}", "train", 2)
    for number in range(waiting):
        credit.complete(f"g{number}", 8, num_bytes)


def server(version: int = 5, *, gone: bool = False, leaving: bool = False) -> StreamServer:
    name = f"s{version}"
    return StreamServer(name, EngineModel(), policy_version=version, gone=gone, leaving=leaving)


def admitted(credit: StalenessCredit, *servers: StreamServer) -> tuple[int, str]:
    decided = credit.admit(servers or [server()])
    assert decided is not None
    return decided.num_groups, decided.blocked_by


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("step", [0, 7])
def test_credit_is_staleness_plus_one_steps_of_groups(max_staleness: int, step: int) -> None:
    assert admitted(made_credit(max_staleness, step=step)) == ((max_staleness + 1) * 10, "")


def test_groups_that_would_begin_with_older_weights_wait_for_the_newer_ones() -> None:
    credit = made_credit(2, step=7)
    hold(credit, running=20)
    assert admitted(credit, server(5), server(4)) == (0, "weights"), "20 groups are two steps"
    credit.is_changed = True
    assert admitted(credit, server(5), server(5)) == (10, "")


def test_a_server_that_gets_no_episodes_withholds_none_from_others() -> None:
    slow = server(4)
    slow.barred = True
    assert admitted(made_credit(2, step=7), server(5), slow) == (30, "")


def test_a_server_ahead_of_the_learner_gives_no_more_credit() -> None:
    assert admitted(made_credit(2, step=7), server(6)) == (30, "")


@given(st.integers(0, 9), st.integers(0, 9))
def test_the_step_of_a_servers_weights_is_a_version_each_behind_the_learners(
    step: int, num_behind: int
) -> None:
    credit = made_credit(step=step)
    assert credit.served_step(server(5 - num_behind)) == max(step - num_behind, 0)


def test_running_and_waiting_groups_use_credit_up() -> None:
    credit = made_credit()
    hold(credit, running=12, waiting=11)
    assert admitted(credit) == (7, "")
    credit = made_credit()
    hold(credit, running=12, waiting=18)
    assert admitted(credit) == (0, "credit")


def test_groups_that_were_promised_use_credit_up_until_they_are_open() -> None:
    credit = made_credit()
    assert admitted(credit) == (30, "")
    credit.is_changed = True
    assert admitted(credit) == (0, "credit")
    hold(credit, running=30)
    assert credit.admit([server()]) is None, "the reason is the same"


def test_a_group_gives_its_credit_back_when_it_is_trained_dropped_or_of_no_use() -> None:
    credit = made_credit()
    hold(credit, running=4, waiting=26)
    assert admitted(credit) == (0, "credit")
    credit.complete("g28", 1, 0)
    assert admitted(credit) == (1, "")
    credit.opened("g30", "train", 2)
    credit.dropped(("g29", "g0"))
    assert admitted(credit) == (2, "")
    credit.opened("g31", "train", 2)
    credit.opened("g32", "train", 2)
    credit.taken([f"g{number}" for number in range(1, 11)])
    credit.is_changed = True
    assert admitted(credit) == (0, "credit"), "the learner has them, and no step has trained them"
    credit.stepped(1)
    assert admitted(credit) == (10, "")


def test_news_that_come_again_change_nothing() -> None:
    credit = made_credit()
    hold(credit, running=15, waiting=15, num_bytes=10)
    for _ in range(2):
        credit.complete("g20", 8, 10)
        credit.taken(["g0", "g1"])
        credit.dropped(("g2",))
    credit.complete("never opened", 8, 10)
    assert (credit.num_running, credit.num_waiting) == (14, 15)


def test_evaluation_groups_need_no_credit() -> None:
    credit = made_credit()
    credit.opened("e0.1", "eval", 1)
    assert admitted(credit) == (30, "")


def test_the_last_steps_get_no_more_groups_than_they_need() -> None:
    assert admitted(made_credit(step=7, max_steps=8)) == (10, "")
    assert admitted(made_credit(step=8, max_steps=8)) == (0, "credit")


def test_nothing_is_admitted_for_a_step_after_the_one_that_an_evaluation_follows() -> None:
    credit = made_credit(step=4)
    credit.bounded(AdmissionBounded(5, 5))
    assert admitted(credit) == (10, "")
    credit = made_credit(step=4)
    credit.bounded(AdmissionBounded(4, 5))
    assert admitted(credit) == (0, "evaluation")


def test_nothing_is_admitted_before_the_bounds_are_told() -> None:
    credit = StalenessCredit(StreamSettings(max_staleness=2, groups_per_step=10))
    assert credit.admit([server()]) == AdmitGroups(0, "evaluation")


def test_without_a_server_that_serves_nothing_starts() -> None:
    assert made_credit().admit([]) == AdmitGroups(0, "servers")
    away = (server(gone=True), server(leaving=True))
    assert admitted(made_credit(), *away) == (0, "servers")


def test_synchronous_training_waits_for_the_slowest_server_and_asynchronous_does_not() -> None:
    behind = (server(4), server(5))
    assert admitted(made_credit(0), *behind) == (0, "weights")
    assert admitted(made_credit(0), server(5), server(6)) == (10, "")
    assert admitted(made_credit(0), server(5), server(4, leaving=True)) == (10, "")
    assert admitted(made_credit(1), *behind) == (20, "")


def test_the_bound_on_groups_counts_running_ones() -> None:
    credit = made_credit(max_buffered_groups=15)
    hold(credit, running=4, waiting=5)
    assert admitted(credit) == (6, "")
    credit = made_credit(max_buffered_groups=15)
    hold(credit, running=10, waiting=5)
    assert admitted(credit) == (0, "buffer")


@pytest.mark.parametrize(("running", "decided"), [(0, (15, "")), (10, (5, "")), (15, (0, "buffer"))])
def test_the_bound_on_bytes_counts_what_running_groups_will_bring(
    running: int, decided: tuple[int, str]
) -> None:
    credit = made_credit(max_buffered_bytes=100_000)
    hold(credit, running, waiting=10, num_bytes=4000)
    assert admitted(credit) == decided


def test_the_size_of_groups_is_known_after_a_restart() -> None:
    credit = made_credit(max_buffered_bytes=100_000, group_bytes=5000.0)
    assert admitted(credit) == (20, "")


@pytest.mark.parametrize(("running", "decided"), [(0, (7, "")), (7, (0, "buffer"))])
def test_groups_too_large_for_the_bound_on_bytes_still_make_one_step(
    running: int, decided: tuple[int, str]
) -> None:
    credit = made_credit(max_buffered_bytes=100_000)
    hold(credit, running, waiting=3, num_bytes=50_000)
    assert admitted(credit) == decided


@given(
    st.integers(0, 4),
    st.integers(0, 99),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(0, 100_000),
)
def test_no_bound_is_ever_exceeded(
    max_staleness: int, step: int, running: int, waiting: int, num_bytes: int
) -> None:
    credit = made_credit(max_staleness, step=step, max_buffered_groups=40)
    hold(credit, running, waiting, num_bytes)
    num_groups, reason = admitted(credit)
    assert num_groups >= 0
    assert (num_groups == 0) == (reason != "")
    if num_groups:
        assert waiting + running + num_groups <= (max_staleness + 1) * 10
        assert waiting + running + num_groups <= 40
