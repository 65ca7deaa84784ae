"""A worker that gives its memory back between steps trains as one that keeps it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tailrace.config import RunConfig
from tailrace_learner.adapters.memory import WorkerMemory, reachable_tensors
from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.adapters.worker import Worker
from tailrace_learner.config import CriticArgs, LearnerConfig, StrategyArgs, check_with_run
from tailrace_learner.core.batch.ranks import OneRank
from tailrace_learner.core.model.policy import local
from tests.unit.tailrace_learner.factory import CPU, prepared_group, random_group
from tests.unit.tailrace_learner.ranks import on_ranks
from tests.unit.tailrace_learner.test_checkpoints import SCRATCH
from tests.unit.tailrace_learner.test_roles import Run, settings


def kept_bytes(worker: Worker) -> int:
    """Bytes of the models' weights and the optimizers' moments; mapped files have none of their own."""
    storages = [local(one).untyped_storage() for one in reachable_tensors(worker)]
    return sum(storage.nbytes() for storage in storages if storage.resizable())


def test_steps_with_sleep_between_them_make_the_same_weights_and_metrics(tmp_path: Path) -> None:
    given = settings(init_kl_coef=0.1, critic=CriticArgs(), adv_estimator="gae", mismatch_versions=1)
    found = []
    for sleeps in (False, True):
        run = Run(tmp_path / str(sleeps), given)
        for step in range(3):
            metrics = run.train(range(step, step + 1))
            if sleeps:
                before = kept_bytes(run.worker)
                run.worker.sleep()
                assert kept_bytes(run.worker) < 0.01 * before
                run.worker.wake()
                assert kept_bytes(run.worker) == before
        found.append((run.weights(), {key: value for key, value in metrics.items() if "_s" not in key}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
    assert found[0][1] == found[1][1]


@pytest.mark.parametrize("named", ["cpu", "cpu:0"])
def test_a_device_with_and_without_its_number_is_the_same(named: str) -> None:
    """A configuration names `cuda`, and tensors there are on `cuda:0`."""
    for place in ("cpu", "cpu:0"):
        tensor = torch.arange(5.0, device=place)
        memory = WorkerMemory([tensor], torch.device(named))
        memory.free()
        assert tensor.untyped_storage().nbytes() == 0
        memory.restore()
        assert tensor.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_no_rank_is_asleep_before_all_have_given_their_memory_back(tmp_path: Path) -> None:
    """Rank 0 tells the servers, which then take the devices of all ranks."""
    tensor, held = torch.ones(5), []

    class Meeting(OneRank):
        def collect(self, mine: Any) -> list[Any]:
            held.append(tensor.untyped_storage().nbytes())
            return [mine]

    strategy = Strategy()
    strategy.world = Meeting()
    worker = Worker(RunConfig(exp_name="unit", output_dir=str(tmp_path)), settings(), strategy)
    worker._memory = WorkerMemory([tensor], CPU)
    worker.sleep()
    assert held == [0]


def train_cut(ranks: TorchRanks, folder: str, sleeps: bool) -> tuple[torch.Tensor, int]:
    """Weights of a rank after two steps, and the bytes that it kept asleep."""
    strategy = StrategyArgs(strategy_name="fsdp2", num_ranks=2)
    given = LearnerConfig(from_scratch=SCRATCH, device="cpu", strategy_args=strategy)
    run = RunConfig(exp_name="unit", output_dir=folder, groups_per_step=2)
    worker = Worker(run, given, Fsdp2Strategy(ranks, CPU))
    worker.load("")
    worker.restore("")
    kept = 0
    for step in range(2):
        worker.begin(step)
        worker.add_all([prepared_group(random_group(2 * step + at), given) for at in range(2)])
        worker.work()
        worker.finish()
        if sleeps:
            worker.sleep()
            kept += kept_bytes(worker)
            worker.wake()
    return torch.cat([local(p).detach().flatten() for p in worker.loaded.model.parameters()]), kept


def test_sharded_workers_sleep_too(tmp_path: Path) -> None:
    results: dict[bool, Any] = {
        sleeps: on_ranks(2, train_cut, str(tmp_path / str(sleeps)), sleeps) for sleeps in (False, True)
    }
    for (awake, _), (slept, kept) in zip(results[False], results[True], strict=True):
        torch.testing.assert_close(awake, slept, rtol=0, atol=0)
        assert kept < 1000


@pytest.mark.parametrize("name", ["deepspeed", "megatron"])
def test_strategies_that_keep_memory_are_refused_by_name(name: str) -> None:
    given = settings(strategy_args=StrategyArgs(strategy_name=name, num_ranks=2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=f"^colocated: learner.strategy_args.strategy_name {name}"):
        check_with_run(given, RunConfig(exp_name="unit", colocated=True))
