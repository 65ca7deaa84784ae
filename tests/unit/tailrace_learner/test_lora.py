"""Adapters: trained alone, published alone, merged in checkpoints, resumed on any number of ranks."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from tailrace.config import ConfigError, RunConfig
from tailrace.weights.tensors import TensorBytes
from tailrace_inference.engine.weights import WeightStage
from tailrace_learner.adapters import hf_model, lora
from tailrace_learner.adapters.checkpoints import CheckpointFolder
from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.adapters.worker import Worker
from tailrace_learner.config import LearnerConfig, LoraArgs
from tests.models.zoo import make_model
from tests.unit.tailrace_learner.factory import CPU, make_rows
from tests.unit.tailrace_learner.ranks import on_ranks
from tests.unit.tailrace_learner.step.test_step import prepared
from tests.unit.tailrace_learner.test_checkpoints import CONFIG, RUN, state

LORA = LoraArgs(r=4, alpha=8, target_modules=("q_proj", "down_proj"))
WITH_LORA = replace(CONFIG, lora=LORA)
ONE_GROUP = replace(RUN, groups_per_step=1, max_steps=8)


def worker(
    config: LearnerConfig = WITH_LORA,
    run: RunConfig = ONE_GROUP,
    checkpoint: str = "",
    strategy: Strategy | None = None,
) -> Worker:
    made = Worker(run, config, strategy or Strategy())
    made.load(checkpoint)
    made.restore(checkpoint)
    return made


def train(one: Worker, steps: range) -> None:
    for step in steps:
        one.begin(step)
        one.add(prepared(make_rows(4, seed=step)))
        one.work()
        one.finish()


def tensors(published: list[TensorBytes]) -> dict[str, torch.Tensor]:
    return {
        tensor.name: torch.frombuffer(bytearray(tensor.data), dtype=torch.float32).view(tensor.shape)
        for tensor in published
    }


def trained_model(one: Worker, folder: Path, step: int) -> tuple[str, Any]:
    """The checkpoint's path, and its model as anybody loads it."""
    path = CheckpointFolder(folder).write(one.snapshot(), state(step))
    return str(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def test_only_adapters_are_trained_and_only_they_are_published_after_the_first_version() -> None:
    one = worker()
    first = tensors(one.weights(True))
    before = tensors(worker(CONFIG).weights(True))
    train(one, range(3))
    later = tensors(one.weights(False))
    adapters = {name for name in first if ".lora_" in name}
    assert set(later) == adapters
    assert len(adapters) == 2 * 2 * 2  # layers, targets, A and B
    assert all(float(later[name].abs().max()) > 0 for name in adapters)
    whole = tensors(one.weights(True))
    assert set(whole) - adapters == set(before)
    for name, tensor in before.items():
        assert torch.equal(whole[name], tensor), name
    assert one.num_parameters == sum(later[name].numel() for name in adapters)


def test_an_engine_makes_the_learners_weights_of_base_and_adapters(tmp_path: Path) -> None:
    one = worker()
    model = AutoModelForCausalLM.from_config(one.loaded.model.config)
    stage = WeightStage(model)
    stage.load(one.weights(True), 3)
    assert stage.base_version == 3
    train(one, range(2))
    staged = stage.load(one.weights(False), 4, base_version=3)
    _, expected = trained_model(one, tmp_path, 2)
    named = {id(parameter): name for name, parameter in model.named_parameters()}
    merged = dict(expected.named_parameters())
    assert len(staged.targets) == 4
    for target, value in zip(staged.targets, staged.values, strict=True):
        torch.testing.assert_close(value, merged[named[id(target)]], rtol=1e-6, atol=1e-7)


class Course(NamedTuple):
    """A worker's checkpoint after three steps, and what it published later."""

    checkpoint: str
    adapters: dict[str, torch.Tensor]  # after the fourth step
    weights: dict[str, torch.Tensor]  # after the fifth


@cache
def course(folder: Path) -> Course:
    one = worker()
    train(one, range(3))
    path, _ = trained_model(one, folder, 3)
    train(one, range(3, 4))
    adapters = tensors(one.weights(False))
    train(one, range(4, 5))
    return Course(path, adapters, tensors(one.weights(True)))


@pytest.fixture
def known(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return course(tmp_path_factory.getbasetemp() / "lora")


def test_training_goes_on_from_merged_weights(known: Course) -> None:
    again = worker(checkpoint=known.checkpoint)
    train(again, range(3, 5))
    for name, tensor in tensors(again.weights(True)).items():
        torch.testing.assert_close(tensor, known.weights[name], rtol=1e-5, atol=1e-6)


def on_a_rank(ranks: TorchRanks, path: str) -> dict[str, torch.Tensor]:
    one = worker(checkpoint=path, strategy=Fsdp2Strategy(ranks, CPU))
    train(one, range(3, 4))
    return tensors(one.weights(False))


def test_adapters_are_trained_on_several_ranks_too(known: Course) -> None:
    on_first, on_second = on_ranks(2, on_a_rank, known.checkpoint)
    assert on_second == {}
    assert on_first.keys() == known.adapters.keys()
    for name, tensor in on_first.items():
        torch.testing.assert_close(tensor, known.adapters[name], rtol=1e-4, atol=1e-5)


def test_layers_that_the_model_has_not_are_refused_by_name() -> None:
    wrong = replace(WITH_LORA, lora=LoraArgs(target_modules=("gate",)))
    with pytest.raises(ConfigError, match=r"lora\.target_modules.*gate"):
        worker(wrong)


def model_of_one_block() -> Any:
    """A model whose first two layers have one weight, in layers of their own."""
    model = make_model("llama")
    first, second = (layer.mlp for layer in model.model.layers[:2])
    second.up_proj.weight = first.up_proj.weight
    return model


def test_a_weight_of_two_layers_gets_no_adapter_since_each_would_have_its_own() -> None:
    with pytest.raises(ConfigError, match=r"one weight for model\.layers\.0\.mlp\.up_proj.*leave"):
        lora.add_adapters(model_of_one_block(), LoraArgs(target_modules=("up_proj",)), seed=0)
    model = model_of_one_block()
    lora.add_adapters(model, LoraArgs(target_modules=("all-linear",)), seed=0)
    adapted = [layer.name for layer in lora.adapted_layers(model) if layer.name.endswith("up_proj")]
    assert adapted == ["model.layers.2.mlp.up_proj", "model.layers.3.mlp.up_proj"]


def test_every_linear_layer_can_be_meant(tmp_path: Path) -> None:
    everywhere = worker(replace(WITH_LORA, lora=LoraArgs(r=2, target_modules=("all-linear",))))
    names = {
        name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors(everywhere.weights(False))
    }
    projections = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert names == projections


def test_a_checkpoint_with_adapters_and_one_without_are_not_mistaken(
    tmp_path: Path, known: Course
) -> None:
    adapted = known.checkpoint
    plain, _ = trained_model(worker(CONFIG), tmp_path, 0)
    with pytest.raises(ConfigError, match="holds adapters"):
        worker(CONFIG, checkpoint=adapted)
    with pytest.raises(ConfigError, match="has no adapters"):
        worker(checkpoint=plain)
    with pytest.raises(ConfigError, match="other adapters"):
        worker(replace(WITH_LORA, lora=replace(LORA, r=8)), checkpoint=adapted)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"r": 0}, r"lora\.r"),
        ({"alpha": 0}, r"lora\.alpha"),
        ({"target_modules": ()}, "at least one"),
    ],
)
def test_adapters_that_make_no_sense_are_refused(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LoraArgs(**settings)


def test_the_scale_is_alpha_over_r() -> None:
    small, large = (worker(replace(WITH_LORA, lora=replace(LORA, alpha=alpha))) for alpha in (4, 8))
    for one in (small, large):
        for module in one.loaded.model.modules():
            if hasattr(module, "lora_B"):
                torch.nn.init.ones_(module.lora_B["default"].weight)
    name = "model.layers.0.self_attn.q_proj.lora_B.weight"
    assert torch.equal(2 * tensors(small.weights(False))[name], tensors(large.weights(False))[name])
    assert hf_model.make_policy(small.loaded, WITH_LORA).parameters
