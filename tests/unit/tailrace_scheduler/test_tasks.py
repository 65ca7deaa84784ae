"""The data order."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from tailrace_protos.episode import EnvTask
from tailrace_scheduler.core.tasks import TaskSource


def test_the_data_order_is_the_same_on_every_machine() -> None:
    source = TaskSource(7, ["A", "B"])
    assert [source.train_task(n) for n in range(3)] == [
        EnvTask("A", 251024090, 0),
        EnvTask("B", 285985607, 0),
        EnvTask("B", 285985608, 1),
    ]


@given(st.integers(0, 2**31), st.permutations(range(30)))
def test_task_n_does_not_depend_on_what_was_asked_before(seed: int, order: list[int]) -> None:
    source = TaskSource(seed, ["A", "B", "C"])
    shuffled = {n: source.train_task(n) for n in order}
    assert [shuffled[n] for n in range(30)] == [
        TaskSource(seed, ["A", "B", "C"]).train_task(n) for n in range(30)
    ]


@given(st.integers(0, 2**31), st.integers(1, 60))
def test_each_of_n_tasks_of_an_environment_is_played_once_before_one_comes_again(
    seed: int, num_tasks: int
) -> None:
    source = TaskSource(seed, ["A", "B"], (2, 1))
    tasks = [source.train_task(n) for n in range(9 * num_tasks)]
    played = [task.seed % num_tasks for task in tasks if task.env_name == "A"]
    for first in range(0, len(played), num_tasks):
        assert set(played[first : first + num_tasks]) == set(range(num_tasks))


def test_another_seed_gives_other_tasks() -> None:
    one, other = TaskSource(1, ["A"]), TaskSource(2, ["A"])
    assert {one.train_task(n).seed for n in range(50)}.isdisjoint(
        other.train_task(n).seed for n in range(50)
    )


@given(st.integers(0, 2**31), st.integers(0, 50))
def test_every_cycle_holds_each_tag_as_often_as_its_share(seed: int, cycle: int) -> None:
    source = TaskSource(seed, ["A", "B"], (1, 3))
    tags = [source.train_task(4 * cycle + position).env_name for position in range(4)]
    assert Counter(tags) == {"A": 1, "B": 3}


@given(st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 4))
def test_ordinals_number_the_tasks_of_each_tag_without_a_gap(seed: int, left: int, right: int) -> None:
    source = TaskSource(seed, ["A", "B"], (left, right), ["X", "Y", "X"])
    for tasks in (
        [source.train_task(n) for n in range(5 * (left + right))],
        [source.eval_task(n) for n in range(11)],
    ):
        for tag in {task.env_name for task in tasks}:
            ordinals = [task.ordinal for task in tasks if task.env_name == tag]
            assert ordinals == list(range(len(ordinals)))


def test_the_evaluation_set_is_the_same_for_every_seed() -> None:
    sets = [[TaskSource(seed, ["A"], (), ["X", "Y"]).eval_task(n) for n in range(4)] for seed in (1, 2)]
    tasks = [EnvTask("X", 0, 0), EnvTask("Y", 1, 0), EnvTask("X", 2, 1), EnvTask("Y", 3, 1)]
    assert sets[0] == sets[1] == tasks


def test_evaluation_plays_the_training_environments_where_none_are_named() -> None:
    assert TaskSource(0, ["A"]).eval_task(5) == EnvTask("A", 5, 5)


def test_shares_of_evaluation_tags_count_in_every_cycle() -> None:
    source = TaskSource(3, ["A"], (), ["X", "Y"], (3, 1))
    drawn = [source.eval_task(n) for n in range(8)]
    assert [task.env_name for task in drawn] == ["X", "X", "X", "Y"] * 2
    assert [task.ordinal for task in drawn] == [0, 1, 2, 0, 3, 4, 5, 1]
    assert [task.seed for task in drawn] == list(range(8))
