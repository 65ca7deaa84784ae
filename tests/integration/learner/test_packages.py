"""Strategies of packages in real processes, two ranks; make test-deepspeed, make test-megatron."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest

from tailrace_protos.event import LearnerResumed, StepFinished
from tests.integration.learner.conftest import LearnerRun
from tests.integration.learner.test_process import feed
from tests.integration.learner.test_ranks import alone, as_it_is, assert_same_weights, saved_after


def needs(package: str, **settings: Any) -> Any:
    """Parameters of a test that runs where the package is."""
    reason = f"make test-{package} installs it in an environment of its own"
    mark = pytest.mark.skipif(find_spec(package) is None, reason=reason)
    return pytest.param({"strategy_name": package, "num_ranks": 2, **settings}, marks=mark)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "strategy_args",
    [
        needs("deepspeed", zero_stage=3),
        needs("megatron", tensor_parallel_size=2),
    ],
    ids=lambda given: given["strategy_name"],
)
async def test_a_run_on_two_ranks_of_a_package_makes_the_weights_of_one_and_resumes(
    learner_run: LearnerRun, strategy_args: dict[str, Any]
) -> None:
    run = learner_run
    steps: dict[str, Any] = {
        "save_steps": 1,
        "training_args": {"learning_rate": 0.01, "adam_epsilon": 1e-2},
    }
    run.configure(**steps, strategy_args=strategy_args)
    run.start("weight_sync")
    run.start("learner")
    first = await run.until(LearnerResumed)
    await feed(run, range(4))
    await saved_after(run, 2)
    assert run.stop("learner") == 0

    run.configure(**steps, strategy_args=strategy_args, max_steps=3)
    run.start("learner")
    again = await run.until(LearnerResumed, lambda body: body.lineage != first.lineage)
    assert again.step == 2
    await feed(run, range(4, 6))
    saved = await saved_after(run, 3)
    assert run.stop("learner") == 0

    other = await alone(run, (range(4), range(4, 6)), as_it_is, **steps)
    assert_same_weights(saved.path, other.run_dir / "checkpoints" / "step_3")
    losses, expected = (
        [body.metrics["loss"] for body in of.bodies(StepFinished)] for of in (run, other)
    )
    assert len(losses) == 3
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)
