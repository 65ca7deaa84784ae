"""Each setting of how the model computes has its effect, and only that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tailrace.config import ConfigError, Endpoints, RunConfig
from tailrace.runtime import Args
from tailrace_learner.adapters import hf_model
from tailrace_learner.adapters.hf_model import TrainableModel, make_policy, prepared, tensor_bytes
from tailrace_learner.adapters.process import _Process
from tailrace_learner.config import FromScratch, LearnerConfig, ModelArgs, TrainingArgs
from tailrace_learner.core.algorithms import LOSSES
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.batch.rows import PreparedGroup
from tailrace_learner.core.cpu.kernels import OneDnnLinear, has_onednn_linear
from tailrace_learner.core.model.policy import PolicyModel, StartWeights
from tailrace_learner.core.step.metric_sums import MetricSums
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.passes import PassRunner
from tailrace_learner.core.step.step import StepTrainer
from tests.unit.tailrace_learner.factory import VOCABULARY, config, make_model, make_rows
from tests.unit.tailrace_learner.stepping import weights

TINY_RATE = 1e-5
TOKENIZER = "tailrace_envs.frozen_lake_tokenizer:build_frozen_lake_tokenizer"


def policy_of(given: LearnerConfig) -> PolicyModel:
    loaded = TrainableModel(prepared(make_model(), given), tokenizer=None)
    return make_policy(loaded, given)


def trainer_of(policy: PolicyModel, given: LearnerConfig, num_groups: int) -> StepTrainer:
    optimizer = SummedOptimizer.of(policy.parameters, given.training_args)
    return StepTrainer(policy, optimizer, given, groups_per_step=num_groups, max_steps=100)


def group(index: int) -> PreparedGroup:
    rows = tuple(make_rows(4, seed=index))
    return PreparedGroup(f"g{index}", index, rows, "", (1.0, 0.0), ())


def published(policy: PolicyModel, given: LearnerConfig) -> torch.Tensor:
    named = policy.model.named_parameters()
    parts = [tensor_bytes(name, tensor, given.model_args.dtype) for name, tensor in named]
    assert {part.dtype for part in parts} == {given.model_args.dtype}
    dtype = getattr(torch, given.model_args.dtype)
    return torch.cat([torch.frombuffer(bytearray(part.data), dtype=dtype) for part in parts])


def test_bfloat16_trains_float32_masters_and_publishes_bfloat16() -> None:
    args = TrainingArgs(learning_rate=TINY_RATE, max_grad_norm=0.0)
    given = config(model_args=ModelArgs(dtype="bfloat16"), training_args=args, device="cpu")
    policy = policy_of(given)
    optimizer = SummedOptimizer.of(policy.parameters, args)
    trainer = StepTrainer(policy, optimizer, given, groups_per_step=1, max_steps=100)
    start, first = weights(policy.parameters), published(policy, given)
    for step in range(20):
        trainer.begin(step)
        trainer.add(group(0))
        trainer.work()
        trainer.finish()
    assert {parameter.dtype for parameter in policy.parameters} == {torch.float32}
    states = [value for state in optimizer.inner.state.values() for value in state.values()]
    assert {state.dtype for state in states} == {torch.float32}
    # A step moves a weight by about the rate, too little for most in bfloat16: only masters add it up.
    moved = (weights(policy.parameters) - start).abs()
    assert float(moved.median()) > 5 * TINY_RATE
    last = published(policy, given)
    assert torch.equal(last, weights(policy.parameters).bfloat16())
    assert 0 < float((last != first).float().mean()) < 0.9


@pytest.mark.parametrize(
    ("dtype", "expected"), [("bfloat16", torch.bfloat16), ("float32", torch.float32)]
)
def test_the_dtype_is_that_of_activations(dtype: Any, expected: torch.dtype) -> None:
    given = config(model_args=ModelArgs(dtype=dtype), device="cpu")
    policy = policy_of(given)
    seen: set[torch.dtype] = set()
    for module in policy.model.modules():
        if isinstance(module, torch.nn.Linear) and module is not policy.model.lm_head:
            module.register_forward_hook(lambda _, inputs, output: seen.add(output.dtype))
    run(policy, given)
    assert seen == {getattr(torch, dtype)}
    assert {parameter.grad.dtype for parameter in policy.parameters} == {torch.float32}


def run(policy: PolicyModel, given: LearnerConfig) -> None:
    """One pass, forward and backward."""
    runner = PassRunner(policy, LOSSES[given.loss], given, StartWeights(policy.parameters))
    runner.run(make_rows(8, seed=1), MetricSums(), is_first=True)


def kept_and_calls(**model_args: Any) -> tuple[int, int]:
    """Bytes kept for the backward pass, and how often a layer was computed in both passes."""
    given = config(model_args=ModelArgs(**model_args), device="cpu")
    policy = policy_of(given)
    kept: dict[int, int] = {}
    calls: list[None] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    layer = policy.model.model.layers[0]
    hooked = layer.self_attn.q_proj.register_forward_hook(lambda *_: calls.append(None))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        learner_logprobs, _ = policy.forward(pack(make_rows(8, seed=1), policy.device))
    learner_logprobs.sum().backward()
    hooked.remove()
    return sum(kept.values()), len(calls)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_checkpointing_keeps_less_and_computes_layers_twice(dtype: Any) -> None:
    plain_bytes, plain_calls = kept_and_calls(disable_gradient_checkpointing=True, dtype=dtype)
    kept_bytes, calls = kept_and_calls(disable_gradient_checkpointing=False, dtype=dtype)
    assert kept_bytes < 0.6 * plain_bytes
    assert (plain_calls, calls) == (1, 2)


@pytest.mark.parametrize("num_threads", [1, 2])
async def test_torch_computes_with_so_many_threads(num_threads: int, tmp_path: Path) -> None:
    run = RunConfig(exp_name="unit", output_dir=str(tmp_path), pretrain="model")
    nowhere = Endpoints(nats_url="nats://x", redis_url="redis://x", host_id="h")
    experiment = {"learner": {"num_threads": num_threads}}
    process = _Process(Args("run.yaml", "learner-0", experiment, run, nowhere))
    assert await process.compute(torch.get_num_threads) == num_threads
    await process.compute.close()


PRODUCTS = (torch.ops.aten.mm.default, torch.ops.mkldnn._linear_pointwise.default)


class Logits(TorchDispatchMode):
    """Keeps how many tokens' logits are computed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.num_tokens: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in PRODUCTS and made.shape[-1] == VOCABULARY:
            self.num_tokens.append(len(made))
        return made


@pytest.mark.parametrize("cpu_matmul_key", ["torch", "onednn"])
def test_cpu_matmul_selects_the_library_of_linear_layers(cpu_matmul_key: Any) -> None:
    if cpu_matmul_key == "onednn" and not has_onednn_linear():
        pytest.skip("this build of torch has no oneDNN linear kernel")
    policy = policy_of(config(device="cpu", cpu_matmul=cpu_matmul_key))
    kinds = {type(each) for each in policy.model.modules() if isinstance(each, torch.nn.Linear)}
    assert kinds == {OneDnnLinear if cpu_matmul_key == "onednn" else torch.nn.Linear}


def test_so_many_logits_are_in_memory_at_once_and_log_probabilities_stay_the_same(
    cpu_matmul: str,
) -> None:
    found = []
    for chunk_tokens in (3, 1000):
        given = {"cpu_matmul": cpu_matmul, "logprob_chunk_tokens": chunk_tokens}
        policy = policy_of(config(device="cpu", **given))
        batch = pack(make_rows(8, seed=1), policy.device)
        with Logits() as logits:
            learner_logprobs, _ = policy.forward(batch)
        assert max(logits.num_tokens) == min(chunk_tokens, len(learner_logprobs))
        found.append(learner_logprobs)
    torch.testing.assert_close(*found)


def test_gradients_are_accumulated_as_groups_arrive_and_applied_once() -> None:
    given = config(device="cpu", training_args=TrainingArgs(learning_rate=1e-2))
    policy = policy_of(given)
    trainer = trainer_of(policy, given, num_groups=2)
    trainer.begin(0)
    before = weights(policy.parameters)
    trainer.add(group(0))
    assert trainer.work()
    first = [parameter.grad.clone() for parameter in policy.parameters]
    assert any(bool(grad.any()) for grad in first)
    assert torch.equal(weights(policy.parameters), before)
    trainer.add(group(1))
    assert trainer.work()
    assert not torch.equal(weights(policy.parameters), before)
    assert all(parameter.grad is None for parameter in policy.parameters)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"dtype": "float32"}, "model_args.dtype bfloat16"),
        ({"dtype": "bfloat16", "device": "cpu"}, "needs a CUDA device: use device cuda"),
    ],
)
def test_flash_attention_is_refused_at_once_where_its_kernel_would_fail(given: Any, named: str) -> None:
    dtype = given.pop("dtype")
    with pytest.raises(ValueError, match=named):
        config(model_args=ModelArgs(dtype=dtype, attn_implementation="flash_attention_2"), **given)


@pytest.mark.parametrize("name", ["flash_attention_2", "flash_attention_3"])
def test_flash_attention_that_is_not_here_is_named_with_the_remedy(name: Any) -> None:
    args = ModelArgs(dtype="bfloat16", attn_implementation=name)
    scratch = FromScratch(model_type="qwen3", tokenizer=TOKENIZER)
    with pytest.raises(ConfigError, match=f"attn_implementation '{name}' needs .*: .*packed"):
        hf_model.make_model(scratch, config(model_args=args), seed=0)
