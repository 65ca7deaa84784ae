"""Several ranks: steps, checkpoints, the death of any rank, a hang, other numbers after a resume."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file

from tailrace_protos.base import (
    as_float32,
    as_int32,
    as_uint8,
    pack_float32,
    pack_int32,
    pack_uint8,
)
from tailrace_protos.event import CheckpointSaved, LearnerResumed, StepFinished
from tailrace_protos.trajectory import Trajectory
from tests.integration.learner.conftest import LearnerRun, experiment
from tests.integration.learner.test_process import WARM_START, feed, trained_once

pytestmark = pytest.mark.timeout(900)  # three learners start, of up to two ranks

Change = Callable[[Trajectory], Trajectory]

TWO_RANKS = {"num_ranks": 2}
IN_A_PASS_S = 0.2  # of computing since the groups of a step came; its passes take ten times as long

_TINY = experiment("", Path())["learner"]["from_scratch"]
LARGER = _TINY | {
    "config": _TINY["config"] | {"hidden_size": 256, "num_hidden_layers": 6, "intermediate_size": 1024}
}


def weights(checkpoint: str) -> dict[str, torch.Tensor]:
    return load_file(Path(checkpoint) / "model.safetensors")


def ranks_of(run: LearnerRun) -> list[psutil.Process]:
    """The processes that compute, rank 0 first."""
    children = psutil.Process(run.processes["learner"].running.pid).children()
    found = {child.environ().get("RANK"): child for child in children}
    return [found["0"], found["1"]]


async def saved_after(run: LearnerRun, step: int) -> CheckpointSaved:
    saved: CheckpointSaved = await run.until(CheckpointSaved, lambda body: body.step == step)
    return saved


async def alone(
    run: LearnerRun, groups: Sequence[range], change: Change, **settings: Any
) -> LearnerRun:
    """The same run by one rank that nothing disturbs; `groups` come when those before are saved."""
    other = LearnerRun(f"{run.name}x", run.folder, run.env, run.redis)
    other.configure(**settings)
    other.start("weight_sync")
    other.start("learner")
    try:
        await other.until(LearnerResumed)
        for indexes in groups:
            await feed(other, indexes, change)
            await saved_after(other, indexes.stop // 2)
    finally:
        other.kill("learner")
        other.kill("weight_sync")
    return other


def assert_same_weights(found: str, expected: Path) -> None:
    theirs, ours = weights(str(expected)), weights(found)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-5, atol=1e-5)


def as_it_is(member: Trajectory) -> Trajectory:
    return member


@pytest.mark.heavy
async def test_two_ranks_make_the_same_weights_as_one_and_either_resumes_the_other(
    learner_run: LearnerRun,
) -> None:
    run = learner_run
    run.configure(strategy_args=TWO_RANKS, warm_start=WARM_START, num_mini_batches=2)
    run.start("weight_sync")
    run.start("learner")
    first = await run.until(LearnerResumed)
    group_ids = await feed(run, range(4))
    on_two = await saved_after(run, 2)
    assert run.stop("learner") == 0

    run.configure(warm_start=WARM_START, num_mini_batches=2)
    run.start("learner")
    again = await run.until(LearnerResumed, lambda body: body.lineage != first.lineage)
    assert again.step == 2
    group_ids += await feed(run, range(4, 8))
    resumed_on_one = await saved_after(run, 4)
    assert await trained_once(run) == {
        group_id: index // 2 + 1 for index, group_id in enumerate(group_ids)
    }
    assert run.stop("learner") == 0

    settings = {"warm_start": WARM_START, "num_mini_batches": 2}
    other = await alone(run, (range(4), range(4, 8)), as_it_is, **settings)
    for on_several, step in ((on_two.path, 2), (resumed_on_one.path, 4)):
        assert_same_weights(on_several, other.run_dir / "checkpoints" / f"step_{step}")


def longer(member: Trajectory) -> Trajectory:
    """Rows of 600 tokens, so that a pass takes long enough to be met in it."""
    (row,) = member.rows
    turn_ends = range(5, 601, 5)
    return replace(
        member,
        rows=(
            replace(
                row,
                token_ids=pack_int32(np.tile(as_int32(row.token_ids), 40)),
                loss_mask=pack_uint8(np.tile(as_uint8(row.loss_mask), 40)),
                inference_logprobs=pack_float32(np.tile(as_float32(row.inference_logprobs), 40)),
                spans=40 * row.spans,
                turn_ends=pack_int32(turn_ends),
                turn_rewards=pack_float32([0.0] * (len(turn_ends) - 1) + [row.reward]),
            ),
        ),
    )


def cpu_s(process: psutil.Process) -> float:
    return float(process.cpu_times().user)


@pytest.mark.heavy
async def test_a_rank_killed_in_a_pass_ends_all_and_the_run_goes_on_as_if_it_had_not_been(
    learner_run: LearnerRun,
) -> None:
    """Rank 0 in a step, rank 1 in the next, then on one rank: as in a run that nothing disturbed."""
    run = learner_run
    settings: dict[str, Any] = {
        "from_scratch": LARGER,
        "training_args": {"learning_rate": 0.01, "adam_epsilon": 1e-2},
        "save_steps": 1,
        "max_steps": 5,
    }
    run.configure(strategy_args=TWO_RANKS, **settings)
    run.start("weight_sync")
    run.start("learner")
    lineages = [(await run.until(LearnerResumed)).lineage]
    group_ids = await feed(run, range(4), longer)
    for step, rank in ((2, 0), (3, 1)):
        await saved_after(run, step)
        victim = ranks_of(run)[rank]
        before_s = cpu_s(victim)
        group_ids += await feed(run, range(2 * step, 2 * step + 2), longer)
        async with asyncio.timeout(60):
            while cpu_s(victim) < before_s + IN_A_PASS_S:
                await asyncio.sleep(0.01)
        victim.kill()
        assert run.ended("learner", 90) == 1
        if rank == 1:
            run.configure(**settings)
        run.start("learner")
        again = await run.until(LearnerResumed, lambda body: body.lineage not in lineages)
        lineages.append(again.lineage)
        assert again.step == step
        finished = [body.step for body in run.bodies(StepFinished)]
        assert finished == list(range(1, step + 1)), "killed after the pass"
    await saved_after(run, 4)
    group_ids += await feed(run, range(8, 10), longer)
    saved = await saved_after(run, 5)
    assert await trained_once(run) == {
        group_id: index // 2 + 1 for index, group_id in enumerate(group_ids)
    }
    assert run.stop("learner") == 0

    parts = (range(4), range(4, 6), range(6, 8), range(8, 10))
    other = await alone(run, parts, longer, **settings)
    assert_same_weights(saved.path, other.run_dir / "checkpoints" / "step_5")
    losses, expected = (
        [body.metrics["loss"] for body in of.bodies(StepFinished)] for of in (run, other)
    )
    assert len(losses) == 5
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-5)


@pytest.mark.heavy
async def test_a_hung_rank_ends_all_by_name_the_run_goes_on_and_no_rank_outlives_its_launcher(
    learner_run: LearnerRun,
) -> None:
    run = learner_run
    run.configure(strategy_args={**TWO_RANKS, "timeout_s": 40.0})
    run.start("weight_sync")
    run.start("learner")
    first = await run.until(LearnerResumed)
    group_ids = await feed(run, range(4))
    await saved_after(run, 2)
    ranks = ranks_of(run)
    ranks[1].suspend()
    group_ids += await feed(run, range(4, 6))
    assert run.ended("learner", 300) == 1
    assert "lost rank 1" in run.log_of("learner")
    _, alive = psutil.wait_procs(ranks, timeout=60)
    assert not alive

    run.start("learner")
    again = await run.until(LearnerResumed, lambda body: body.lineage != first.lineage)
    assert again.step == 2
    group_ids += await feed(run, range(6, 8))
    await saved_after(run, 4)
    assert await trained_once(run) == {
        group_id: index // 2 + 1 for index, group_id in enumerate(group_ids)
    }

    ranks = ranks_of(run)
    run.kill("learner")
    gone, alive = await asyncio.to_thread(psutil.wait_procs, ranks, timeout=60)
    assert len(gone) == 2
    assert not alive


@pytest.mark.heavy
async def test_a_mistake_of_the_user_ends_all_ranks_with_code_2_and_its_line_last(
    learner_run: LearnerRun,
) -> None:
    run = learner_run
    run.configure(strategy_args=TWO_RANKS, resume_from_checkpoint="/nowhere/step_1")
    run.start("learner")
    assert run.ended("learner", 90) == 2
    assert "is no checkpoint" in run.log_of("learner").splitlines()[-1]
