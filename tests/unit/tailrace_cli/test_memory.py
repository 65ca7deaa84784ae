"""The estimate of memory against memory that was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.config import ConfigError
from tailrace_cli.experiment import Experiment, load
from tailrace_cli.loading.facts import MachineFacts, ModelFacts
from tailrace_cli.loading.memory import GIB, memory_of, memory_table
from tailrace_cli.loading.model_facts import model_facts
from tailrace_cli.loading.needs import engine_needs, layer_bytes, rank_needs
from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.core.step.optimizer import SummedOptimizer

EXAMPLE = Path(__file__).parents[3] / "examples" / "frozen_lake" / "experiment.yaml"
NUM_TOKENS = 320  # no size of a weight, by which copies of weights are told apart
MARGIN = 0.05  # of the activations that autograd keeps
SHAPES = (
    {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 128},
    {"hidden_size": 96, "num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 512},
)


def tiny(model_type: str, shape: dict[str, int]) -> tuple[Any, ModelFacts]:
    config = AutoConfig.for_model(
        model_type, num_hidden_layers=4, head_dim=16, vocab_size=64, tie_word_embeddings=False, **shape
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    facts = model_facts(model_type, config.to_json_string().encode())
    count = sum(parameter.numel() for parameter in model.parameters())
    return model, msgspec.structs.replace(facts, num_parameters=count)


def kept_bytes(model: Any, *, is_half: bool) -> int:
    """Bytes that autograd keeps of a forward pass, aside from the weights and their copies."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    matrices = {tuple(parameter.shape) for parameter in model.parameters() if parameter.dim() == 2}
    matrices |= {shape[::-1] for shape in matrices}
    kept: dict[int, tuple[int, torch.Tensor]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        is_copy = is_half and tensor.dtype == torch.bfloat16 and tuple(tensor.shape) in matrices
        if storage.data_ptr() not in weights and not is_copy:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.zeros((1, NUM_TOKENS), dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=is_half),
    ):
        model.model(ids)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_activations_are_those_that_autograd_keeps(
    model_type: str, shape: dict[str, int], dtype: str
) -> None:
    model, facts = tiny(model_type, shape)
    measured = kept_bytes(model, is_half=dtype == "bfloat16")
    estimated = NUM_TOKENS * facts.num_layers * layer_bytes(facts, dtype)
    assert estimated == pytest.approx(measured, rel=MARGIN)


def test_weights_gradients_and_moments_are_exact() -> None:
    model, facts = tiny("qwen3", SHAPES[1])
    optimizer = SummedOptimizer.of(list(model.parameters()), TrainingArgs())
    model(torch.zeros((1, 8), dtype=torch.long)).logits.sum().backward()
    gradients = sum(each.grad.nbytes for each in model.parameters())
    optimizer.update(count=1.0, learning_rate=1e-6, max_grad_norm=0.0)
    moments = [value for each in model.parameters() for value in optimizer.moments(each).values()]
    needs = rank_needs(load(EXAMPLE), facts)
    assert needs.weights == sum(each.nbytes for each in model.parameters())
    assert needs.gradients == gradients
    assert needs.optimizer == sum(value.nbytes for value in moments if value.dim())


def test_keys_and_values_are_those_of_the_engines_cache() -> None:
    _, facts = tiny("qwen3", SHAPES[1])
    chosen = load(EXAMPLE, ["inference.kv_cache_tokens=8192"])
    per_token = 2 * 4 * facts.num_layers * SHAPES[1]["num_key_value_heads"] * 16
    assert engine_needs(chosen, facts, 0).cache == 8192 * per_token


SEVEN = ModelFacts(
    name="seven",
    num_parameters=7_615_616_512,
    vocab_size=152_064,
    hidden_size=3584,
    num_layers=28,
    kv_width=28 * 2 * 512,
    attention_width=3584,
    inner_size=18_944,
    num_tables=2,
)


def on_gpus(*overrides: str) -> Experiment:
    return load(EXAMPLE, ["learner.device=auto", "inference.device=auto", *overrides])


def test_parallel_ranks_and_engines_divide_what_they_hold() -> None:
    whole, cut = (
        engine_needs(
            on_gpus("inference.engine=vllm", f"inference.tensor_parallel_size={size}"), SEVEN, 0
        )
        for size in (1, 4)
    )
    assert (cut.weights, cut.cache) == (whole.weights // 4, whole.cache // 4)
    one, eight = (
        rank_needs(on_gpus(f"learner.strategy_args.num_ranks={ranks}"), SEVEN) for ranks in (1, 8)
    )
    assert eight.weights == one.weights // 8
    assert eight.optimizer == one.optimizer // 8
    assert eight.activations > one.activations  # layers are gathered to compute


def test_a_teacher_counts_with_its_own_size() -> None:
    chosen = on_gpus("learner.init_kl_coef=0.1", "learner.reference.pretrain=teacher")
    as_large = rank_needs(chosen, SEVEN)
    larger = replace(SEVEN, role_sizes={"reference": 32_000_000_000})
    more = rank_needs(chosen, larger).others - as_large.others
    size = 2 if chosen.learner.model_args.dtype == "bfloat16" else 4
    assert more == size * (32_000_000_000 - SEVEN.num_parameters)


@pytest.mark.parametrize("engine", ["torch", "hf"])
def test_our_engines_hold_the_base_of_adapters_beside_two_sets_of_weights(engine: str) -> None:
    lora = "learner.lora={r: 8, target_modules: [all-linear]}"
    one = engine_needs(on_gpus("inference.engine=vllm", lora), SEVEN, 0).weights
    named = f"inference.engine={engine}"
    assert engine_needs(on_gpus(named), SEVEN, 0).weights == 2 * one
    assert engine_needs(on_gpus(named, lora), SEVEN, 0).weights == 3 * one


def test_an_engine_fills_its_share_of_a_gpu() -> None:
    chosen = on_gpus("inference.engine=vllm", "inference.gpu_memory_utilization=0.5")
    needs = engine_needs(chosen, SEVEN, 80 * GIB)
    assert needs.least + needs.activations == 40 * GIB


def test_the_table_shows_each_user_once_with_its_devices() -> None:
    chosen = on_gpus(
        "inference.engine=vllm", "learner.strategy_args.num_ranks=2", "cluster.num_inference_servers=2"
    )
    machine = MachineFacts(host_bytes=0, shm_bytes=0, gpu_bytes=(80 * GIB,) * 4)
    _, *lines = table = list(memory_table(list(memory_of(chosen, SEVEN, machine))))
    assert max(map(len, table)) <= 80
    assert [" ".join(line.split()[:5]) for line in lines] == [
        "published weights, host - -",
        "older weights, host - -",
        "staged versions, host - -",
        "learner, GPU 0 to 1",
        "engine, GPU 2 to 3",
    ]


def test_a_configuration_that_contradicts_itself_is_the_users_mistake() -> None:
    content = json.dumps({"model_type": "qwen3", "layer_types": ["full_attention"]}).encode()
    with pytest.raises(ConfigError, match=r"the model's config\.json: .*layer_types"):
        model_facts("own", content)
