"""Tensor parallelism by the real package: the weights that one process makes. Needs megatron-core."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

pytest.importorskip(
    "megatron.core", reason="make test-megatron installs it in an environment of its own"
)

from tailrace.config import ConfigError
from tailrace_learner.adapters.checkpoints import CheckpointFolder
from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.megatron import MegatronStrategy
from tailrace_learner.adapters.worker import Worker
from tailrace_learner.config import ModelArgs, StrategyArgs, WarmStart
from tailrace_learner.core.batch.packing import pack
from tests.unit.tailrace_learner.factory import CPU, make_model, make_policy, make_rows
from tests.unit.tailrace_learner.ranks import on_ranks
from tests.unit.tailrace_learner.step.test_warm_start import demonstrations
from tests.unit.tailrace_learner.test_checkpoints import CONFIG, state
from tests.unit.tailrace_learner.test_lora import ONE_GROUP, tensors
from tests.unit.tailrace_learner.test_lora import train as train_worker
from tests.unit.tailrace_learner.test_lora import worker as made_worker
from tests.unit.tailrace_learner.test_ranks import Trained, assert_alike, gradients, taken_over, train


def cut_by(ranks: TorchRanks, size: int) -> MegatronStrategy:
    args = StrategyArgs(strategy_name="megatron", num_ranks=ranks.num_ranks, tensor_parallel_size=size)
    return MegatronStrategy(ranks, args)


def train_cut(ranks: TorchRanks, size: int, family: str, settings: dict[str, Any]) -> Trained:
    return train(cut_by(ranks, size), family, settings)


@pytest.mark.parametrize(
    ("num_ranks", "size", "family", "settings"),
    [
        (2, 2, "qwen3", {}),
        (2, 2, "llama", {"num_mini_batches": 2, "ppo_epochs": 2, "entropy_loss_coef": 0.01}),
        (2, 2, "qwen2", {"loss": "m2po", "behaviour_correction": "none", "num_mini_batches": 3}),
        (2, 1, "qwen3", {}),
        (4, 2, "qwen3", {"num_mini_batches": 2, "ppo_epochs": 2}),
    ],
)
def test_ranks_train_as_one_does(
    num_ranks: int, size: int, family: str, settings: dict[str, Any]
) -> None:
    one = train(Strategy(), family, settings)
    for trained in on_ranks(num_ranks, train_cut, size, family, settings):
        assert_alike(trained, one)


def lay(ranks: TorchRanks, family: str) -> dict[str, tuple[tuple[int, ...], tuple[int, ...]]]:
    """Each parameter's shape on this rank and in full."""
    strategy = cut_by(ranks, 2)
    model = strategy.spread(make_policy(family)).model
    return {name: (tuple(p.shape), strategy.shape(p)) for name, p in model.named_parameters()}


def test_heads_and_inner_neurons_are_cut_and_names_and_full_shapes_stay() -> None:
    whole = {name: tuple(p.shape) for name, p in make_model("qwen2").named_parameters()}
    for laid in on_ranks(2, lay, "qwen2"):
        assert {name: full for name, (_, full) in laid.items()} == whole
        layer = {name.removeprefix("model.layers.1."): mine for name, (mine, _) in laid.items()}
        assert layer["self_attn.q_proj.weight"] == (16, 32)
        assert layer["self_attn.k_proj.bias"] == (8,)
        assert layer["self_attn.o_proj.weight"] == (32, 16)
        assert layer["mlp.gate_proj.weight"] == (24, 32)
        assert layer["mlp.down_proj.weight"] == (32, 24)
        assert layer["input_layernorm.weight"] == (32,)


def forward_cut(ranks: TorchRanks, autocast: bool) -> torch.Tensor:
    policy = dataclasses.replace(cut_by(ranks, 2).spread(make_policy("qwen2")), autocast=autocast)
    learner_logprobs, _ = policy.forward(pack(make_rows(6), CPU))
    learner_logprobs.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in policy.parameters)
    return learner_logprobs.detach()


def test_bfloat16_activations_are_those_of_one_process() -> None:
    batch = pack(make_rows(6), CPU)
    exact, _ = make_policy("qwen2").forward(batch)
    narrow, _ = dataclasses.replace(make_policy("qwen2"), autocast=True).forward(batch)
    for found in on_ranks(2, forward_cut, False):
        torch.testing.assert_close(found, exact.detach(), rtol=1e-5, atol=1e-5)
    for found in on_ranks(2, forward_cut, True):
        assert (found - narrow).abs().mean() < 2 * (narrow - exact).abs().mean()
        assert (found - exact).abs().mean() > 1e-4  # it was bfloat16


def restored(ranks: TorchRanks, moments: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return taken_over(cut_by(ranks, 2), moments)


def test_moments_of_another_strategy_are_taken_over() -> None:
    _, moments, _ = train(Strategy(), "qwen3", {})
    for found in on_ranks(2, restored, moments):
        assert found.keys() == moments.keys()
        for name, value in moments.items():
            assert torch.equal(found[name], value), name


def gradients_cut(ranks: TorchRanks) -> tuple[float, bool]:
    return gradients(cut_by(ranks, 2))


def test_a_gradient_that_is_not_finite_on_one_rank_is_thrown_away_by_all() -> None:
    assert on_ranks(2, gradients_cut) == [(0.0, True)] * 2


def resumed(
    ranks: TorchRanks, path: str, folder: Path
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Published weights at the checkpoint, and a step later, of which a checkpoint is written."""
    one = made_worker(CONFIG, checkpoint=path, strategy=cut_by(ranks, 2))
    first = tensors(one.weights(True))
    train_worker(one, range(2, 3))
    snapshot = one.snapshot()
    if ranks.rank == 0:
        CheckpointFolder(folder).write(snapshot, state(3))
    return first, tensors(one.weights(True))


def test_a_checkpoint_goes_from_one_process_to_cut_layers_and_back(tmp_path: Path) -> None:
    one = made_worker(CONFIG)
    train_worker(one, range(2))
    path = CheckpointFolder(tmp_path).write(one.snapshot(), state(2))
    (first, last), of_second = on_ranks(2, resumed, str(path), tmp_path)
    assert of_second == ({}, {})  # rank 0 alone publishes
    expected = tensors(one.weights(True))
    assert first.keys() == expected.keys()
    assert all(torch.equal(first[name], tensor) for name, tensor in expected.items())
    again = made_worker(CONFIG, checkpoint=str(path.with_name("step_3")))
    assert all(torch.equal(tensor, last[name]) for name, tensor in tensors(again.weights(True)).items())
    train_worker(one, range(2, 4))
    train_worker(again, range(3, 4))
    found, expected = tensors(again.weights(True)), tensors(one.weights(True))
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def warm_started(strategy: Strategy) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss of the last supervised step, and the weights after it; layers are computed twice."""
    steps = WarmStart(demonstrations="unused:here", num_steps=3, batch_size=5, warmup_steps=0)
    again = ModelArgs(disable_gradient_checkpointing=False)
    one = Worker(ONE_GROUP, replace(CONFIG, warm_start=steps, model_args=again), strategy)
    one.load("")
    loss = one.warm_start(demonstrations(15), lambda step, loss: None)
    return loss, {name: strategy.whole(p) for name, p in one.loaded.model.named_parameters()}


def warm_started_cut(ranks: TorchRanks) -> tuple[float, dict[str, torch.Tensor]]:
    return warm_started(cut_by(ranks, 2))


def test_the_warm_start_is_that_of_one_process() -> None:
    loss, weights = warm_started(Strategy())
    for found_loss, found in on_ranks(4, warm_started_cut):
        assert found_loss == pytest.approx(loss, 1e-5)
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def start_kept(ranks: TorchRanks, folder: Path) -> dict[str, torch.Tensor]:
    """Published weights of a run that keeps those of its start for a reference."""
    run = replace(ONE_GROUP, output_dir=str(folder))
    one = made_worker(replace(CONFIG, init_kl_coef=0.1), run, strategy=cut_by(ranks, 2))
    first = tensors(one.weights(True))
    train_worker(one, range(1))
    return first


def test_the_weights_of_the_start_are_kept_in_full_for_the_reference(tmp_path: Path) -> None:
    first, _ = on_ranks(2, start_kept, tmp_path)
    run = replace(ONE_GROUP, output_dir=str(tmp_path))
    kept = AutoModelForCausalLM.from_pretrained(run.run_dir / "start", dtype=torch.float32)
    for name, parameter in kept.named_parameters():
        assert torch.equal(parameter, first[name]), name


def refusal(ranks: TorchRanks, settings: dict[str, Any]) -> str:
    policy = make_policy()
    for key, value in settings.items():
        setattr(policy.model.config, key, value)
    with pytest.raises(ConfigError) as raised:
        cut_by(ranks, 2).spread(policy)
    return str(raised.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_attention_heads": 3}, "does not divide the model's num_attention_heads (3)"),
        ({"num_key_value_heads": 1}, "num_key_value_heads (1): use a divisor of 1"),
        ({"intermediate_size": 45}, "intermediate_size (45)"),
        ({"model_type": "gemma3"}, "not gemma3: use fsdp2"),
    ],
)
def test_models_that_cannot_be_cut_are_refused(settings: dict[str, Any], says: str) -> None:
    for message in on_ranks(2, refusal, settings):
        assert says in message
