"""Several ranks: steps, checkpoints, the death of any rank, another number of ranks after a resume."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from tailrace_protos.event import CheckpointSaved, LearnerResumed, StepFinished
from tests.integration.learner.conftest import LearnerRun
from tests.integration.learner.test_process import WARM_START, feed, trained_once

TWO_RANKS = {"num_ranks": 2}


def weights(checkpoint: str) -> dict[str, torch.Tensor]:
    return load_file(Path(checkpoint) / "model.safetensors")


def ranks_of(run: LearnerRun) -> list[psutil.Process]:
    """The processes that compute, rank 0 first."""
    children = psutil.Process(run.processes["learner"].pid).children()
    found = {child.environ().get("RANK"): child for child in children}
    return [found["0"], found["1"]]


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
    on_two = await run.until(CheckpointSaved, lambda body: body.step == 2)
    assert run.stop("learner") == 0

    run.configure(warm_start=WARM_START, num_mini_batches=2)
    run.start("learner")
    again = await run.until(LearnerResumed, lambda body: body.lineage != first.lineage)
    assert again.step == 2
    group_ids += await feed(run, range(4, 8))
    resumed_on_one = await run.until(CheckpointSaved, lambda body: body.step == 4)
    assert await trained_once(run) == {
        group_id: index // 2 + 1 for index, group_id in enumerate(group_ids)
    }
    assert run.stop("learner") == 0

    alone = LearnerRun(f"{run.name}x", run.folder, run.env, run.redis)
    alone.configure(warm_start=WARM_START, num_mini_batches=2)
    alone.start("weight_sync")
    alone.start("learner")
    try:
        await alone.until(LearnerResumed)
        await feed(alone, range(4))
        await alone.until(CheckpointSaved, lambda body: body.step == 2)
        await feed(alone, range(4, 8))
        await alone.until(CheckpointSaved, lambda body: body.step == 4)
    finally:
        alone.kill("learner")
        alone.kill("weight_sync")
    for on_several, step in ((on_two.path, 2), (resumed_on_one.path, 4)):
        expected = weights(str(alone.run_dir / "checkpoints" / f"step_{step}"))
        found = weights(on_several)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_killed_rank_ends_all_and_nothing_is_trained_twice(
    learner_run: LearnerRun, rank: int
) -> None:
    run = learner_run
    run.configure(strategy_args=TWO_RANKS)
    run.start("weight_sync")
    run.start("learner")
    first = await run.until(LearnerResumed)
    group_ids = await feed(run, range(5))  # the third step has one of its groups
    await run.until(CheckpointSaved, lambda body: body.step == 2)
    os.kill(ranks_of(run)[rank].pid, signal.SIGKILL)
    assert run.processes.pop("learner").wait(90) == 1

    run.configure()
    run.start("learner")
    again = await run.until(LearnerResumed, lambda body: body.lineage != first.lineage)
    assert again.step == 2
    group_ids += await feed(run, range(5, 8))
    await run.until(CheckpointSaved, lambda body: body.step == 4)
    assert await trained_once(run) == {
        group_id: index // 2 + 1 for index, group_id in enumerate(group_ids)
    }
    assert [body.step for body in run.bodies(StepFinished)] == [1, 2, 3, 4]


@pytest.mark.heavy
async def test_ranks_do_not_outlive_their_launcher(learner_run: LearnerRun) -> None:
    run = learner_run
    run.configure(strategy_args=TWO_RANKS)
    run.start("weight_sync")
    run.start("learner")
    await run.until(LearnerResumed)
    ranks = ranks_of(run)
    run.kill("learner")
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    assert len(gone) == 2
    assert not alive


@pytest.mark.heavy
async def test_a_mistake_of_the_user_ends_all_ranks_with_code_2_and_its_line_last(
    learner_run: LearnerRun,
) -> None:
    run = learner_run
    run.configure(strategy_args=TWO_RANKS, resume_from_checkpoint="/nowhere/step_1")
    run.start("learner")
    assert run.processes.pop("learner").wait(90) == 2
    assert "is no checkpoint" in run.log_of("learner").splitlines()[-1]
