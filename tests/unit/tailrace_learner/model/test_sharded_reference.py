"""A reference that is cut over the ranks says what a whole one says, in a part of the memory."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tailrace.config import RunConfig
from tailrace_learner.adapters import hf_model
from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.adapters.worker import Worker
from tailrace_learner.config import (
    LearnerConfig,
    LoraArgs,
    ModelArgs,
    ReferenceArgs,
    StrategyArgs,
    TrainingArgs,
)
from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.model.forward_path import ForwardPath
from tailrace_learner.core.model.policy import PolicyModel, local
from tailrace_learner.core.model.reference import Reference
from tailrace_learner.core.step.estimates import Roles
from tailrace_learner.core.step.step import StepTrainer
from tests.unit.tailrace_learner.factory import (
    CPU,
    config,
    make_model,
    make_policy,
    make_rows,
    prepared_group,
    random_group,
)
from tests.unit.tailrace_learner.ranks import on_ranks
from tests.unit.tailrace_learner.stepping import moved
from tests.unit.tailrace_learner.test_checkpoints import SCRATCH

# A large epsilon: Adam would make equal steps of gradients that are nothing but rounding.
ARGS = TrainingArgs(learning_rate=0.1, adam_epsilon=1e-2, max_grad_norm=0.5)
TWO = StrategyArgs(num_ranks=2)


def reference_of(ranks: TorchRanks, given: LearnerConfig, *, sharded: bool) -> Reference:
    policy = moved(make_policy(), seed=3)
    if not sharded:
        return Reference(policy, given)
    return Reference(Fsdp2Strategy(ranks, CPU).spread(policy), given, holders=ranks)


def log_refs(rows: list[TrainingRow]) -> list[Any]:
    return [row.ref_logprobs for row in rows]


def asked(ranks: TorchRanks, num_rows: tuple[int, int]) -> tuple[list[Any], float]:
    """Log-probabilities of a sharded reference for this rank's rows, and its share of weights."""
    given = config(max_tokens_per_micro_batch=25)
    policy = moved(make_policy(), seed=3)
    whole = sum(parameter.numel() for parameter in policy.model.parameters())
    reference = Reference(Fsdp2Strategy(ranks, CPU).spread(policy), given, holders=ranks)
    rows = make_rows(max(num_rows))[: num_rows[ranks.rank]]
    reference.fill(rows)
    first = [None if row.ref_logprobs is None else row.ref_logprobs.copy() for row in rows]
    reference.fill(rows)  # nothing lacks it: no pass
    assert all(np.array_equal(a, b) for a, b in zip(first, log_refs(rows), strict=True))
    return first, sum(local(each).numel() for each in policy.model.parameters()) / whole


@pytest.mark.parametrize("num_rows", [(6, 2), (5, 0), (0, 0)])
def test_ranks_with_other_numbers_of_rows_get_what_a_whole_reference_says(
    num_rows: tuple[int, int],
) -> None:
    expected = make_rows(max(num_rows))
    reference = Reference(moved(make_policy(), seed=3), config(max_tokens_per_micro_batch=25))
    reference.fill(expected)
    found = on_ranks(2, asked, num_rows)
    for (answers, share), number in zip(found, num_rows, strict=True):
        assert share == pytest.approx(0.5, abs=0.01)
        assert len(answers) == number
        for answer, row in zip(answers, expected, strict=False):
            np.testing.assert_allclose(answer, row.ref_logprobs, atol=1e-6)


def train(ranks: TorchRanks, sharded: bool, settings: dict[str, Any]) -> Any:
    """Weights and metrics of two steps on two ranks."""
    given = config(training_args=ARGS, max_tokens_per_micro_batch=40, init_kl_coef=0.2, **settings)
    strategy = Fsdp2Strategy(ranks, CPU)
    policy = strategy.spread(make_policy())
    stepper = StepTrainer(
        policy,
        strategy.make_optimizer(policy, ARGS),
        given,
        groups_per_step=2,
        max_steps=8,
        ranks=strategy.ranks,
        roles=Roles(reference_of(ranks, given, sharded=sharded)),
    )
    for step in range(2):
        stepper.begin(step)
        for index in range(2):
            stepper.add(prepared_group(random_group(step * 2 + index), given))
            stepper.work()
        metrics = stepper.finish()
    return [strategy.whole(p).clone() for p in policy.model.parameters()], metrics


def both(ranks: TorchRanks, settings: dict[str, Any]) -> tuple[Any, Any]:
    return train(ranks, True, settings), train(ranks, False, settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"ppo_epochs": 2, "target_kl": 0.01, "kl_horizon": 9},
        {"adv_estimator": "reinforce_plus_plus", "num_mini_batches": 2},
    ],
)
def test_training_is_that_with_a_whole_reference(settings: dict[str, Any]) -> None:
    for (cut, metrics), (whole, expected) in on_ranks(2, both, settings):
        assert metrics["kl"] > 1e-3
        assert metrics == {
            name: value if value is None else pytest.approx(value, 1e-6, 1e-6)
            for name, value in expected.items()
        }
        for tensor, other in zip(cut, whole, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-6, atol=1e-6)


def run_first_step(ranks: TorchRanks, folder: str) -> tuple[float, float | None]:
    """The share of the run's reference that a rank holds, and the divergence of the first step."""
    given = LearnerConfig(
        from_scratch=SCRATCH,
        device="cpu",
        init_kl_coef=0.1,
        reference=ReferenceArgs(sharded=True),
        model_args=ModelArgs(dtype="bfloat16"),
        strategy_args=TWO,
    )
    run = RunConfig(exp_name="unit", output_dir=folder, groups_per_step=1)
    worker = Worker(run, given, Fsdp2Strategy(ranks, CPU))
    worker.load("")
    worker.restore("")
    worker.begin(0)
    worker.add(prepared_group(random_group(0), given))
    worker.work()
    reference = worker._trainer._policy._reference
    assert reference is not None
    held = sum(local(each).numel() for each in reference._policy.model.parameters())
    return held / worker.num_parameters, worker.finish()["kl"]


def test_a_run_with_a_cut_reference_starts_at_it(tmp_path: Path) -> None:
    for share, divergence in on_ranks(2, run_first_step, str(tmp_path)):
        assert share == pytest.approx(0.5, abs=0.01)
        assert divergence == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("family", ["qwen3", "qwen2"])  # with tied embeddings, and with biases
def test_a_narrow_reference_says_the_same_in_fewer_bytes(family: str) -> None:
    def num_bytes(policy: PolicyModel) -> int:
        return sum(each.numel() * each.element_size() for each in policy.model.parameters())

    wide, narrow = (dataclasses.replace(make_policy(family), autocast=True) for _ in range(2))
    hf_model.narrow(narrow.model)
    expected, found = make_rows(4), make_rows(4)
    Reference(wide, config()).fill(expected)
    Reference(narrow, config()).fill(found)
    assert num_bytes(narrow) < 0.6 * num_bytes(wide)
    for row, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(row.ref_logprobs, other.ref_logprobs)


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({}, "meta"),
        ({"strategy_args": StrategyArgs(strategy_name="deepspeed")}, "meta"),
        ({"strategy_args": StrategyArgs(strategy_name="megatron")}, "meta"),
        ({"strategy_args": TWO}, "cpu"),
        ({"strategy_args": TWO, "lora": LoraArgs()}, "cpu"),
    ],
)
def test_a_model_that_is_to_be_cut_waits_on_the_host(
    settings: dict[str, Any], place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_model, "pick_device", lambda _: torch.device("meta"))
    monkeypatch.setattr(hf_model, "choose_path", lambda *_: ForwardPath())  # `meta` computes nothing
    model = hf_model.prepared(make_model(), config(**settings))
    assert {each.device.type for each in model.state_dict().values()} == {place}


@pytest.mark.parametrize(
    ("strategy", "named"),
    [
        (StrategyArgs(), "here is single: use fsdp2"),
        (StrategyArgs(strategy_name="deepspeed", num_ranks=2), "here is deepspeed"),
        (StrategyArgs(strategy_name="megatron", num_ranks=2), "here is megatron"),
    ],
)
def test_a_reference_is_cut_by_fsdp2_alone(strategy: StrategyArgs, named: str) -> None:
    with pytest.raises(ValueError, match=rf"reference\.sharded .*{named}"):
        config(init_kl_coef=0.1, reference=ReferenceArgs(sharded=True), strategy_args=strategy)


def test_a_reference_is_cut_or_offloaded() -> None:
    with pytest.raises(ValueError, match=r"reference\.offload .* reference\.sharded .*give one"):
        ReferenceArgs(sharded=True, offload=True)
