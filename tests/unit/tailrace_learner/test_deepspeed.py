"""ZeRO by the real package: the weights that one process makes. Needs the extra `deepspeed`."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="make test-deepspeed installs it in an environment of its own")

from tailrace_learner.adapters import hf_model
from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.deepspeed import DeepspeedStrategy, Zero3Strategy
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.model.policy import local
from tests.unit.tailrace_learner.factory import CPU, make_policy, make_rows
from tests.unit.tailrace_learner.ranks import on_ranks
from tests.unit.tailrace_learner.test_ranks import (
    ARGS,
    GIVEN,
    Trained,
    assert_alike,
    go_on,
    taken_over,
    train,
)


def zero(ranks: TorchRanks, stage: int) -> DeepspeedStrategy:
    return Zero3Strategy(ranks, ARGS) if stage == 3 else DeepspeedStrategy(ranks, stage, ARGS)


def train_by_zero(
    ranks: TorchRanks, stage: int, family: str, settings: dict[str, Any], recomputes: bool
) -> Trained:
    return train(zero(ranks, stage), family, settings, recomputes=recomputes)


TWICE = {"num_mini_batches": 2, "ppo_epochs": 2, "entropy_loss_coef": 0.01}


@pytest.mark.parametrize(
    ("stage", "recomputes", "family", "settings"),
    [
        (1, False, "qwen3", {}),
        (2, False, "llama", TWICE),
        (3, False, "qwen3", {}),
        (3, True, "qwen3", {}),
        (3, False, "llama", TWICE),
    ],
)
def test_two_ranks_train_as_one_does(
    stage: int, recomputes: bool, family: str, settings: dict[str, Any]
) -> None:
    one = train(Strategy(), family, settings)
    for trained in on_ranks(2, train_by_zero, stage, family, settings, recomputes):
        assert_alike(trained, one)


def held_after_a_pass(ranks: TorchRanks) -> tuple[list[int], list[int]]:
    policy = zero(ranks, 3).spread(make_policy())
    learner_logprobs, entropy = policy.forward(pack(make_rows(2), CPU))
    (learner_logprobs.sum() if ranks.rank else (learner_logprobs + entropy).sum()).backward()
    gathered = [parameter.numel() for parameter in policy.parameters]
    return gathered, [local(parameter).numel() for parameter in policy.parameters]


def test_between_passes_a_rank_holds_its_part_of_every_weight_and_no_more() -> None:
    sizes = [parameter.numel() for parameter in make_policy().parameters]
    for gathered, held in on_ranks(2, held_after_a_pass):
        assert gathered == [0] * len(sizes)
        assert held == [size // 2 for size in sizes]


def restored(
    ranks: TorchRanks, stage: int, moments: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return taken_over(zero(ranks, stage), moments)


@pytest.mark.parametrize(("stage", "num_ranks"), [(2, 2), (3, 3)])  # many weights in uneven parts
def test_moments_of_another_strategy_are_taken_over(stage: int, num_ranks: int) -> None:
    _, moments, _ = train(Strategy(), "qwen3", {})
    for found in on_ranks(num_ranks, restored, stage, moments):
        assert found.keys() == moments.keys()
        for name, value in moments.items():
            assert torch.equal(found[name].view(value.shape), value), name


def update_of_nonsense(ranks: TorchRanks, stage: int) -> list[tuple[bool, bool, bool]]:
    """Updates of which the second has gradients of the last rank that are no numbers.

    Of each: whether it counts as applied, has a norm, and changed a weight.
    """
    strategy = zero(ranks, stage)
    policy = strategy.spread(make_policy())
    optimizer = strategy.make_optimizer(policy, ARGS)
    named = dict(policy.model.named_parameters())
    found = []
    for factor in (1.0, torch.nan if ranks.rank else 1.0, 1.0):
        before = {name: strategy.whole(each).clone() for name, each in named.items()}
        learner_logprobs, entropy = policy.forward(pack(make_rows(2), CPU))
        (factor * (learner_logprobs + entropy).sum()).backward()
        result = optimizer.update(count=1.0, learning_rate=1e-2, max_grad_norm=1.0)
        after = {name: strategy.whole(each) for name, each in named.items()}
        assert all(bool(each.isfinite().all()) for each in after.values())
        changed = any(not torch.equal(before[name], after[name]) for name in before)
        found.append((result.is_applied, math.isfinite(result.grad_norm), changed))
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_gradient_that_is_not_finite_on_one_rank_is_thrown_away_by_all(stage: int) -> None:
    fine, thrown_away = (True, True, True), (False, False, False)
    assert on_ranks(2, update_of_nonsense, stage) == [[fine, thrown_away, fine]] * 2


def go_on_by_zero(ranks: TorchRanks, source: str, steps: range, folder: Path) -> str:
    return go_on(zero(ranks, 3), source, steps, folder)


def test_checkpoints_of_cut_weights_go_on_in_one_process_and_back(tmp_path: Path) -> None:
    first = on_ranks(2, go_on_by_zero, "", range(2), tmp_path / "cut")[0]
    second = go_on(Strategy(), str(first), range(2, 4), tmp_path / "cut")
    third = on_ranks(2, go_on_by_zero, str(second), range(4, 6), tmp_path / "cut")[0]
    alone = go_on(Strategy(), "", range(6), tmp_path / "alone")
    found, expected = (hf_model.load_model(str(path), GIVEN).model for path in (third, alone))
    for (name, left), (_, right) in zip(
        found.named_parameters(), expected.named_parameters(), strict=True
    ):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5, msg=name)
