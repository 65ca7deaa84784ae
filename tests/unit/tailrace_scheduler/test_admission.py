"""The bounds of admission, each with a situation in which it alone decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.config import RunConfig
from tailrace_scheduler.config import CapacityError, SchedulerConfig, check_capacity
from tailrace_scheduler.core.admission import AdmissionRule, BufferState, ServerView

HEALTHY = ServerView(1, 5, 5)


def made_rule(max_staleness: int = 2, max_steps: int = 100, **bounds: int) -> AdmissionRule:
    run = RunConfig(exp_name="x", groups_per_step=10, max_staleness=max_staleness, max_steps=max_steps)
    return AdmissionRule(run, SchedulerConfig(tags=("A",), **bounds))


def made_buffer(
    step: int = 0, running: int = 0, ready: int = 0, mean_bytes: float = 0.0
) -> BufferState:
    return BufferState(step, running, ready, int(ready * mean_bytes), mean_bytes)


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("step", [0, 7])
def test_credit_is_staleness_plus_one_steps_of_groups(max_staleness: int, step: int) -> None:
    rule = made_rule(max_staleness)
    assert rule.admit(made_buffer(step), HEALTHY) == ((max_staleness + 1) * 10, "")


def test_running_and_ready_groups_use_credit_up() -> None:
    assert made_rule().admit(made_buffer(running=12, ready=11), HEALTHY) == (7, "")
    assert made_rule().admit(made_buffer(running=12, ready=18), HEALTHY) == (0, "credit")


def test_the_last_steps_get_no_more_groups_than_they_need() -> None:
    assert made_rule(max_steps=8).admit(made_buffer(step=7), HEALTHY) == (10, "")
    assert made_rule(max_steps=8).admit(made_buffer(step=8), HEALTHY) == (0, "credit")


def test_without_a_healthy_server_nothing_starts() -> None:
    assert made_rule().admit(made_buffer(), ServerView(0, -1, 5)) == (0, "servers")


def test_synchronous_training_waits_for_the_slowest_server_and_asynchronous_does_not() -> None:
    behind = ServerView(2, 4, 5)
    assert made_rule(0).admit(made_buffer(), behind) == (0, "weights")
    assert made_rule(0).admit(made_buffer(), ServerView(2, 5, 5)) == (10, "")
    assert made_rule(1).admit(made_buffer(), behind) == (20, "")


def test_the_bound_on_groups_counts_running_ones() -> None:
    rule = made_rule(max_buffered_groups=15)
    assert rule.admit(made_buffer(running=4, ready=5), HEALTHY) == (6, "")
    assert rule.admit(made_buffer(running=10, ready=5), HEALTHY) == (0, "buffer")


def test_the_bound_on_bytes_counts_what_running_groups_will_bring() -> None:
    rule = made_rule(max_buffered_bytes=100_000)
    assert rule.admit(made_buffer(ready=10, mean_bytes=4000), HEALTHY) == (15, "")
    assert rule.admit(made_buffer(running=10, ready=10, mean_bytes=4000), HEALTHY) == (5, "")
    assert rule.admit(made_buffer(running=15, ready=10, mean_bytes=4000), HEALTHY) == (0, "buffer")


def test_groups_too_large_for_the_bound_on_bytes_still_make_one_step() -> None:
    rule = made_rule(max_buffered_bytes=100_000)
    assert rule.admit(made_buffer(ready=3, mean_bytes=50_000), HEALTHY) == (7, "")
    assert rule.admit(made_buffer(ready=3, running=7, mean_bytes=50_000), HEALTHY) == (0, "buffer")


@given(st.integers(0, 4), st.integers(0, 99), st.integers(0, 60), st.integers(0, 60), st.floats(0, 1e5))
def test_no_bound_is_ever_exceeded(
    max_staleness: int, step: int, running: int, ready: int, mean_bytes: float
) -> None:
    rule = made_rule(max_staleness, max_buffered_groups=40)
    admitted, reason = rule.admit(made_buffer(step, running, ready, mean_bytes), HEALTHY)
    assert admitted >= 0
    assert (admitted == 0) == (reason != "")
    if admitted:
        accepted = step * 10 + ready
        assert accepted + running + admitted <= (max_staleness + step + 1) * 10
        assert running + ready + admitted <= 40


def test_a_buffer_smaller_than_one_step_is_refused_with_key_and_remedy() -> None:
    run = RunConfig(exp_name="x", groups_per_step=10)
    with pytest.raises(CapacityError, match=r"max_buffered_groups: 9 .* at least 10") as refused:
        check_capacity(run, SchedulerConfig(tags=("A",), max_buffered_groups=9))
    assert (refused.value.key, refused.value.needed) == ("scheduler.max_buffered_groups", 10)
    check_capacity(run, SchedulerConfig(tags=("A",), max_buffered_groups=10))


def test_bytes_that_hold_no_step_are_refused() -> None:
    with pytest.raises(CapacityError, match="max_buffered_bytes"):
        check_capacity(RunConfig(exp_name="x"), SchedulerConfig(tags=("A",), max_buffered_bytes=1000))


def test_more_valid_members_than_members_are_refused() -> None:
    with pytest.raises(ValueError, match="min_valid: 9"):
        check_capacity(RunConfig(exp_name="x", group_size=8), SchedulerConfig(tags=("A",), min_valid=9))


def test_an_interim_set_larger_than_the_set_is_refused() -> None:
    with pytest.raises(ValueError, match="eval_interim_groups: 9"):
        check_capacity(
            RunConfig(exp_name="x"), SchedulerConfig(tags=("A",), eval_groups=8, eval_interim_groups=9)
        )


def test_two_valid_members_are_needed_where_members_are_compared_and_one_elsewhere() -> None:
    config = SchedulerConfig(tags=("A",))
    assert [config.needed_valid(size) for size in (1, 2, 8)] == [1, 2, 2]
    assert SchedulerConfig(tags=("A",), min_valid=5).needed_valid(8) == 5
