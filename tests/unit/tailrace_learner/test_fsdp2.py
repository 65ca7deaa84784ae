"""Sharded training with what saves memory: recomputation, shared prefixes, bfloat16; snapshots."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch

from tailrace_learner.adapters import hf_model
from tailrace_learner.adapters.hf_model import TrainableModel
from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.snapshots import take_snapshot
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.config_models import ModelArgs
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.step import StepTrainer
from tests.models.judge import moved_model
from tests.unit.tailrace_learner.factory import CPU, config, make_policy, make_rows
from tests.unit.tailrace_learner.model.test_shared_prefixes import episode_rows, group_rows
from tests.unit.tailrace_learner.ranks import on_ranks
from tests.unit.tailrace_learner.step.test_step import prepared
from tests.unit.tailrace_learner.test_ranks import ARGS

Weights = dict[str, torch.Tensor]


def policy_of(*, recomputes: bool = False, autocast: bool = False, zoo: str = "") -> PolicyModel:
    """A policy of our usual model, or of an entry of the zoo on its own path of rows."""
    if zoo:
        args = ModelArgs(disable_gradient_checkpointing=not recomputes)
        return PolicyModel(
            hf_model.prepared(moved_model(zoo), config(device="cpu", model_args=args)), CPU, 1.0, 64
        )
    policy = make_policy("qwen3")
    if recomputes:
        policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    return dataclasses.replace(policy, autocast=autocast)


def trained(strategy: Strategy, **how: Any) -> tuple[Weights, float]:
    """Weights and the last loss after two steps of groups and an episode that share prefixes."""
    policy = strategy.spread(policy_of(**how))
    given = config(training_args=ARGS, max_tokens_per_micro_batch=60)
    optimizer = strategy.make_optimizer(policy, ARGS)
    trainer = StepTrainer(
        policy, optimizer, given, groups_per_step=3, max_steps=8, ranks=strategy.ranks
    )
    for step in range(2):
        trainer.begin(step)
        for rows in (group_rows(1 + step, 6), episode_rows(5 + step), group_rows(11 + step, 3)):
            trainer.add(prepared(copy.deepcopy(rows)))
            trainer.work()
        metrics = trainer.finish()
    named = policy.model.named_parameters()
    weights = {name: strategy.whole(parameter).clone() for name, parameter in named}
    loss = metrics["loss"]
    assert loss is not None
    return weights, loss


def trained_sharded(ranks: TorchRanks, how: dict[str, Any]) -> tuple[Weights, float]:
    return trained(Fsdp2Strategy(ranks, CPU), **how)


def test_shared_prefixes_and_recomputed_layers_train_on_three_ranks_as_on_one() -> None:
    how = {"recomputes": True}
    expected, expected_loss = trained(Strategy(), **how)
    for weights, loss in on_ranks(3, trained_sharded, how):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "zoo",
    [
        "qwen3_moe",
        "longcat_flash",  # on one rank all tokens of a pass may take experts without weights
        "deepseek_v4",  # rows by themselves; short ones leave weights unused
        "zamba2",  # two layers have one block
        "gemma3",  # its vision tower has no gradient
    ],
)
def test_models_of_other_kinds_train_on_two_ranks_as_on_one(zoo: str) -> None:
    how = {"recomputes": True, "zoo": zoo}
    expected, expected_loss = trained(Strategy(), **how)
    for weights, loss in on_ranks(2, trained_sharded, how):
        assert loss == pytest.approx(expected_loss, rel=1e-4)
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("recomputes", [True, False])
def test_bfloat16_trains_as_on_one_rank_within_its_rounding(recomputes: bool) -> None:
    how = {"recomputes": recomputes, "autocast": True}
    start = {name: each.detach() for name, each in make_policy("qwen3").model.named_parameters()}
    expected, expected_loss = trained(Strategy(), **how)
    moved = max(float((expected[name] - start[name]).abs().max()) for name in start)
    for weights, loss in on_ranks(2, trained_sharded, how):
        assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
        assert loss == pytest.approx(expected_loss, abs=5e-3)  # log-probabilities: to about 1e-2
        apart = max(float((weights[name] - expected[name]).abs().max()) for name in expected)
        assert apart < 0.1 * moved


def kept_weights(ranks: TorchRanks, how: dict[str, bool]) -> tuple[int, int]:
    """Bytes of layers' weights that a forward leaves for the backward; of all shards in bfloat16."""
    policy = policy_of(**how)
    named = [each for name, each in policy.model.named_parameters() if "layers" in name]
    matrices = [parameter for parameter in named if parameter.dim() == 2]
    shapes = {tuple(matrix.shape) for matrix in matrices}
    shapes |= {shape[::-1] for shape in shapes}
    policy = Fsdp2Strategy(ranks, CPU).spread(policy)
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) in shapes:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.forward(pack(make_rows(6), CPU))
    # What was gathered and given back has no memory left.
    sizes = [tensor.untyped_storage().size() for tensor in kept.values()]
    return sum(sizes), 2 * sum(matrix.numel() for matrix in matrices)


@pytest.mark.parametrize("autocast", [True, False])
def test_no_layer_stays_gathered_from_the_forward_to_the_backward(autocast: bool) -> None:
    for kept, whole in on_ranks(2, kept_weights, {"autocast": autocast}):
        assert kept < 0.1 * whole


def snapshot(ranks: TorchRanks) -> Any:
    strategy = Fsdp2Strategy(ranks, CPU)
    policy = strategy.spread(make_policy())
    optimizer = strategy.make_optimizer(policy, ARGS)
    for parameter in policy.parameters:
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.update(count=1.0, learning_rate=1e-3, max_grad_norm=1.0)
    taken = take_snapshot(TrainableModel(policy.model, tokenizer=None), strategy)
    return taken.weights, taken.optimizer


def test_only_the_first_rank_copies_the_model_to_the_host() -> None:
    first, second = on_ranks(2, snapshot)
    assert second == ({}, {})
    weights, optimizer = first
    named = dict(make_policy().model.named_parameters())
    assert {name: weights[name].shape for name in named} == {n: p.shape for n, p in named.items()}
    assert all(optimizer[f"{name}.exp_avg"].shape == each.shape for name, each in named.items())
