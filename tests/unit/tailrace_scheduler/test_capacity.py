"""Settings that the capacity check refuses, with key and remedy."""

from __future__ import annotations

import pytest

from tailrace.config import RunConfig
from tailrace_scheduler.config import CapacityError, SchedulerConfig, check_capacity


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
