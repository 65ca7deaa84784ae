"""Named evaluations: their tasks and samples, pass@k, and weights that stay while they are played."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.config import EvaluationArgs
from tailrace_protos.episode import Outcome
from tailrace_protos.event import (
    EvaluationFinished,
    EvaluationStarted,
    LearnerResumed,
    WeightsPublished,
)
from tailrace_scheduler.core.evaluation import EvaluationTally
from tailrace_scheduler.core.run_log import Rows
from tests.unit.tailrace_scheduler.simulation import SimulatedRun, made_settlement
from tests.unit.tailrace_scheduler.test_core_promises import made_run, play_to_the_end

NAMED = {
    "greedy": EvaluationArgs(tag="A", num_tasks=2, temperature=0.0),
    "sampled": EvaluationArgs(tag="A", num_tasks=2, num_samples=4, temperature=1.0),
    "B": EvaluationArgs(),
}


def opened(world: SimulatedRun) -> SimulatedRun:
    world.resume(0)
    world.served_version = 0
    world.beat()
    world.decide()
    return world


def test_every_named_evaluation_plays_its_tasks_and_samples() -> None:
    world = opened(made_run(0, 2, evaluations=NAMED))
    tasks = [(group.plan.tasks[0], len(group.plan.tasks)) for group in world.open.values()]
    assert [(task.evaluation, task.env_name, task.ordinal, size) for task, size in tasks] == [
        ("greedy", "A", 0, 1),
        ("greedy", "A", 1, 1),
        ("sampled", "A", 0, 4),
        ("sampled", "A", 1, 4),
        ("B", "B", 0, 1),
        ("B", "B", 1, 1),
        ("B", "B", 2, 1),
        ("B", "B", 3, 1),
    ]


def test_the_first_evaluation_is_the_headline_and_each_has_its_metrics() -> None:
    world = opened(made_run(0, 2, evaluations=NAMED))
    for group_id, group in list(world.open.items()):
        solved = {"greedy": (0,), "sampled": (0, 1), "B": ()}[group.plan.tasks[0].evaluation]
        for member in range(len(group.plan.tasks)):
            world.random.random = lambda: 0.9  # type: ignore[method-assign]
            if member in solved:
                world.random.random = lambda: 0.1  # type: ignore[method-assign]
            world.settle(group_id, member, Outcome.OK)
    world.decide()
    (row,) = Rows(world.changes)
    assert row["eval/success_rate"] == row["eval/tag/greedy/success_rate"] == 1.0
    assert row["eval/tag/sampled/success_rate"] == 0.5
    assert row["eval/tag/sampled/pass@2"] == pytest.approx(1 - 1 / 6)
    assert row["eval/tag/sampled/pass@4"] == 1.0
    assert row["eval/tag/B/success_rate"] == 0.0
    assert not [key for key in row if "pass@" in key and "sampled" not in key]


def test_pass_at_k_averages_over_tasks_with_enough_valid_samples() -> None:
    tally = EvaluationTally()
    for member, reward in enumerate((1.0, 0.0, 0.0)):
        tally.count(made_settlement("e0.0", member, reward=reward))
    for member in range(2):
        tally.count(made_settlement("e0.1", member, reward=0.0))
    tally.count(made_settlement("e0.1", 2, Outcome.TIMEOUT))
    assert tally.means().pass_at == pytest.approx({2: (2 / 3 + 0) / 2, 3: 1.0})


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(0, 3), st.integers(0, 80), st.sampled_from([None, True, False])
)
def test_no_weights_appear_during_a_pinned_evaluation(
    seed: int, max_staleness: int, num_wild: int, pin_evaluations: bool | None
) -> None:
    world = made_run(seed, max_staleness, evaluations=NAMED, pin_evaluations=pin_evaluations)
    play_to_the_end(world, num_wild)
    bodies = [event.body for event in world.events]
    if pin_evaluations is False or sum(isinstance(one, LearnerResumed) for one in bodies) > 1:
        return  # a resumed learner first trains what was sent to its predecessor
    running, version = 0, -1
    for body in bodies:
        if isinstance(body, WeightsPublished):
            assert running == 0
            version = body.policy_version
        elif isinstance(body, EvaluationStarted):
            running += 1
            assert (body.policy_version, body.step) == (version, version)
        elif isinstance(body, EvaluationFinished):
            running -= 1
    evaluated = [body.step for body in bodies if isinstance(body, EvaluationFinished)]
    assert evaluated == [0, 2, 4, 5]
