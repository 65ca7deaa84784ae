"""Runs that go on with other settings of their evaluations."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tailrace.config import EvaluationArgs
from tailrace_protos.episode import Outcome
from tailrace_protos.event import EvaluationFinished, EvaluationStarted
from tests.unit.tailrace_scheduler.simulation import SimulatedRun
from tests.unit.tailrace_scheduler.test_core_promises import made_run, play_to_the_end


def started_run(**settings: Any) -> SimulatedRun:
    """A run whose first evaluation is under way: four tasks, in turns of two tags."""
    world = made_run(0, 2, **settings)
    world.resume(0)
    world.served_version = 0
    world.beat()
    world.decide()
    assert {group.plan.phase for group in world.open.values()} == {"eval"}
    return world


def go_on_with(world: SimulatedRun, **settings: int | bool) -> None:
    """The run is stopped and goes on with these settings; the scheduler decides."""
    world.config = msgspec.structs.replace(world.config, **settings)
    world.restart()
    world.decide()


def finished(world: SimulatedRun) -> list[EvaluationFinished]:
    return [one.body for one in world.events if isinstance(one.body, EvaluationFinished)]


@pytest.mark.parametrize(
    "settings", [{"eval_group_size": 4}, {"eval_groups": 2}, {"eval_greedy": True}]
)
def test_a_run_goes_on_with_other_evaluations_than_those_that_it_has_finished(
    settings: dict[str, int | bool],
) -> None:
    world = started_run()
    world.play_all()
    world.decide()
    (first,) = finished(world)
    go_on_with(world, **settings)
    assert finished(world) == [first]
    assert not any(group.plan.phase == "eval" for group in world.open.values())
    assert world.core.status(world.now_s).phase == "training"
    play_to_the_end(world, 0)


def test_a_run_goes_on_with_fewer_tasks_of_a_named_evaluation() -> None:
    world = made_run(0, 2, evaluations={"A": EvaluationArgs(num_tasks=4)})
    world.resume(0)
    world.served_version = 0
    world.beat()
    world.decide()
    world.play_all()
    world.decide()
    world.run = msgspec.structs.replace(world.run, evaluations={"A": EvaluationArgs(num_tasks=1)})
    go_on_with(world)
    assert world.core.status(world.now_s).phase == "training"


@pytest.mark.parametrize(
    ("before", "after", "sizes"),
    [
        ({"eval_group_size": 4}, {"eval_group_size": 1}, [1, 1, 1, 1]),
        ({"eval_group_size": 1}, {"eval_group_size": 4}, [4, 4, 4, 4]),
        ({}, {"eval_groups": 2}, [1, 1]),
        ({"eval_group_size": 2}, {"eval_group_size": 1, "eval_greedy": True}, [1] * 8),
        ({}, {"eval_tags": ("C",)}, [1, 1, 1, 1]),
    ],
)
def test_an_evaluation_under_way_begins_again_as_it_is_set_now(
    before: dict[str, int], after: dict[str, int | bool], sizes: list[int]
) -> None:
    world = started_run(**before)
    world.settle("e0-v0.00000", 0, Outcome.OK)
    go_on_with(world, **after)
    world.decide()
    begun = [group.plan for group in world.open.values() if group.plan.phase == "eval"]
    assert [len(plan.tasks) for plan in begun] == sizes
    assert {plan.group_id.rpartition(".")[0] for plan in begun} == {"e0-v0-again"}
    world.restart()  # once more, as it is set now
    world.play_all()
    world.decide()
    (done,) = finished(world)
    assert done.evaluation_id == "e0-v0-again"
    assert done.num_episodes == sum(sizes)
    assert done.num_valid + (done.greedy.num_valid if done.greedy else 0) == sum(sizes)
    play_to_the_end(world, 0)


def test_no_evaluation_has_the_name_of_one_that_was_taken_back_before_another_restart() -> None:
    """Groups of one name come only once."""
    world = started_run()
    for size in (4, 2, 3):
        world.settle(next(iter(world.open)), 0, Outcome.OK)
        go_on_with(world, eval_group_size=size)
        world.decide()
        begun = [group.plan for group in world.open.values() if group.plan.phase == "eval"]
        assert [len(plan.tasks) for plan in begun] == [size] * 4
    started = [one.body for one in world.events if isinstance(one.body, EvaluationStarted)]
    assert len({one.evaluation_id for one in started}) == len(started) == 4
    play_to_the_end(world, 0)


def test_an_evaluation_under_way_goes_on_if_its_settings_stay() -> None:
    world = started_run(eval_group_size=2)
    world.settle("e0-v0.00000", 0, Outcome.OK)
    go_on_with(world, max_attempts=7)
    world.play_all()
    world.decide()
    started = [one.body for one in world.events if isinstance(one.body, EvaluationStarted)]
    assert [one.evaluation_id for one in started] == ["e0-v0"]
    assert finished(world)[0].num_valid == 8
