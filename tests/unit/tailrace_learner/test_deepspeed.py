"""ZeRO by the real package: the weights that one process makes. Needs the extra `deepspeed`."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

os.environ.setdefault("DS_ACCELERATOR", "cpu")
pytest.importorskip("deepspeed", reason="make test-deepspeed installs it in an environment of its own")

from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.strategies.deepspeed import DeepspeedStrategy
from tailrace_learner.adapters.strategies.single import SingleStrategy
from tests.unit.tailrace_learner.factory import make_policy
from tests.unit.tailrace_learner.ranks import on_ranks
from tests.unit.tailrace_learner.test_ranks import ARGS, Trained, train


def train_by_zero(ranks: TorchRanks, stage: int, family: str, settings: dict[str, Any]) -> Trained:
    return train(DeepspeedStrategy(ranks, stage, ARGS), family, settings)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3", {}),
        ("llama", {"num_mini_batches": 2, "ppo_epochs": 2, "entropy_loss_coef": 0.01}),
    ],
)
def test_two_ranks_train_as_one_does(stage: int, family: str, settings: dict[str, Any]) -> None:
    one = train(SingleStrategy(), family, settings)
    for trained in on_ranks(2, train_by_zero, stage, family, settings):
        for found, expected in zip(trained[:2], one[:2], strict=True):
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                scale = float(tensor.abs().max())
                torch.testing.assert_close(found[name], tensor, rtol=1e-5, atol=1e-5 * scale, msg=name)
        for name, value in one[2].items():
            assert trained[2][name] == (value if value is None else pytest.approx(value, 1e-5, 1e-7))


def restored(ranks: TorchRanks, moments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    strategy = DeepspeedStrategy(ranks, 2, ARGS)
    policy = strategy.spread(make_policy())
    strategy.make_optimizer(policy, ARGS)
    named = list(policy.model.named_parameters())
    assert all(strategy.moments(parameter) == {} for _, parameter in named)
    for name, parameter in named:
        kept = {moment: moments[f"{name}.{moment}"] for moment in ("step", "exp_avg", "exp_avg_sq")}
        strategy.set_moments(parameter, kept)
    return {
        f"{name}.{moment}": value.clone()
        for name, parameter in named
        for moment, value in strategy.moments(parameter).items()
    }


def test_moments_of_another_strategy_are_taken_over() -> None:
    _, moments, _ = train(SingleStrategy(), "qwen3", {})
    for found in on_ranks(2, restored, moments):
        assert found.keys() == moments.keys()
        for name, value in moments.items():
            assert torch.equal(found[name].view(value.shape), value), name
