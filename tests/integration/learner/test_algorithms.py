"""The learner's process with models beside the policy, and with groups that nobody can use."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tailrace_protos.base import pack_int32
from tailrace_protos.event import CheckpointSaved, LearnerResumed, StepFinished
from tailrace_protos.trajectory import Trajectory
from tests.integration.learner.conftest import LearnerRun

pytestmark = pytest.mark.heavy

ROLES: dict[str, Any] = {
    "adv_estimator": "gae",
    "critic": {"critic_warmup": 1, "training_args": {"learning_rate": 0.01}},
    "init_kl_coef": 0.1,
    "kl_in": "reward",
    "target_kl": 0.001,
    "kl_horizon": 50,
}


async def test_a_killed_learner_goes_on_with_its_critic_its_reference_and_its_weight(
    learner_run: LearnerRun,
) -> None:
    run = learner_run
    run.configure(**ROLES)
    run.start("weight_sync")
    run.start("learner")
    first = await run.until(LearnerResumed)
    for index in range(6):
        await run.put_group(index)
    await run.until(CheckpointSaved, lambda body: body.step == 2)
    once = await run.until(StepFinished, lambda body: body.step == 3)
    run.kill("learner")
    run.start("learner")
    again = await run.until(LearnerResumed, lambda body: body.lineage != first.lineage)
    assert again.step == 2
    repeated = await run.until(
        StepFinished, lambda body: body.step == 3 and body.lineage == again.lineage
    )
    for name in ("loss", "kl", "kl_coef", "value_loss", "explained_variance", "grad_norm"):
        assert repeated.metrics[name] == pytest.approx(once.metrics[name], rel=1e-4), name
    assert once.metrics["kl"] > 0
    assert once.metrics["kl_coef"] != 0.1
    steps = {body.step: body.metrics for body in run.bodies(StepFinished)}
    assert steps[1]["loss"] is None  # the critic alone
    assert steps[1]["value_loss"] is not None


def worthless(member: Trajectory) -> Trajectory:
    return msgspec.structs.replace(member, reward=math.nan)


def unreadable(member: Trajectory) -> Trajectory:
    """Token ids that the model does not have."""
    row = msgspec.structs.replace(member.rows[0], token_ids=pack_int32([10**6] * 15))
    return msgspec.structs.replace(member, rows=(row,))


async def test_groups_that_cannot_be_used_are_counted_and_the_run_goes_on(
    learner_run: LearnerRun,
) -> None:
    run = learner_run
    run.configure(max_steps=2)
    run.start("weight_sync")
    run.start("learner")
    await run.put_group(0, worthless)
    await run.put_group(1, unreadable)
    await run.put_group(2)
    await run.put_group(3)
    saved = await run.until(CheckpointSaved, lambda body: body.step == 2)
    bad, good = (body.metrics for body in run.bodies(StepFinished))
    assert bad["num_nonfinite_rewards"] == 4
    assert bad["num_malformed_episodes"] == 4
    assert bad["loss"] is None
    assert good["loss"] is not None
    assert good["num_nonfinite_rewards"] == 0
    assert Path(saved.path).is_dir()
    assert (await run.buffer.counters()).retained_groups == 0


async def test_two_ranks_train_with_a_critic_and_a_reference(learner_run: LearnerRun) -> None:
    run = learner_run
    run.configure(max_steps=2, strategy_args={"num_ranks": 2}, **ROLES)
    run.start("weight_sync")
    run.start("learner")
    for index in range(4):
        await run.put_group(index)
    saved = await run.until(CheckpointSaved, lambda body: body.step == 2)
    assert (Path(saved.path) / "critic.safetensors").is_file()
    _, second = (body.metrics for body in run.bodies(StepFinished))
    assert second["loss"] is not None
    assert second["explained_variance"] is not None
    assert second["kl"] == pytest.approx(0.0, abs=1e-6)  # the first step that moves the policy
