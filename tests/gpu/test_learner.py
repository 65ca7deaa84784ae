"""The learner on a GPU: its kernels against float64 on the CPU, its steps against the CPU's."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tailrace.offload import Offload
from tailrace_learner.adapters.hf_model import pick_path
from tailrace_learner.adapters.memory import WorkerMemory
from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.config import LearnerConfig, TrainingArgs
from tailrace_learner.config_execution import StrategyArgs
from tailrace_learner.core.batch.packing import PackedBatch, pack
from tailrace_learner.core.batch.ranks import ONE_RANK
from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.cpu.tree_attention import tree_attention
from tailrace_learner.core.model import attention
from tailrace_learner.core.model.bucket_attention import bucket_attention
from tailrace_learner.core.model.flex import flex
from tailrace_learner.core.model.logprobs import token_logprobs
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.step import StepTrainer
from tests.unit.tailrace_learner.factory import CPU, VOCABULARY, config
from tests.unit.tailrace_learner.model.test_shared_prefixes import episode_rows, group_rows, row_of
from tests.unit.tailrace_learner.step.test_step import prepared
from tests.world.servers import free_port

CUDA = torch.device("cuda")
MIB = 1 << 20
ARGS = TrainingArgs(learning_rate=1e-2, max_grad_norm=1.0)
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2}  # relative, of the largest number


def long_rows() -> list[TrainingRow]:
    """Answers that branch off a prompt of several blocks of the kernel, and a row of its own."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, 300)
    answers = [
        np.concatenate((prompt, [i], rng.integers(0, VOCABULARY, n)))
        for i, n in enumerate((170, 420, 30))
    ]
    alone = rng.integers(0, VOCABULARY, 500)
    return [row_of(str(i), row, 301, i) for i, row in enumerate([*answers, alone])]


def attended(
    compute: Any, batch: PackedBatch, states: list[torch.Tensor], window: int | None
) -> list[Any]:
    """Output, and gradients of queries, keys and values, in float64 on the host."""
    given = [each.detach().requires_grad_() for each in states]
    output = compute(*given, batch.packed, scale=None, window=window)
    weights = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view(output.shape)
    output.backward(weights.to(output))
    return [each.detach().cpu().double() for each in (output, *(each.grad for each in given))]


def apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference, relative."""
    return float((found - expected).norm() / expected.norm())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("shares", [True, False])
def test_attention_and_its_gradients_are_those_of_the_cpu_in_float64(
    dtype: torch.dtype, window: int | None, shares: bool
) -> None:
    rows = long_rows()
    on_host, batch = (pack(rows, device, share_prefixes=shares) for device in (CPU, CUDA))
    assert bool(batch.packed.branches) == shares
    size = len(on_host.packed.reach)
    torch.manual_seed(0)
    states = [torch.randn(size, heads, 64, dtype=torch.float64) for heads in (8, 2, 2)]
    rounded = [each.to(dtype) for each in states]
    expected = attended(tree_attention, on_host, [each.double() for each in rounded], window)
    for compute in [flex] if shares else [flex, bucket_attention]:
        found = attended(compute, batch, [each.to(CUDA) for each in rounded], window)
        for one, other in zip(found, expected, strict=True):
            assert apart(one, other) < TOLERANCE[dtype], compute.__name__


def test_one_compiled_kernel_serves_batches_of_all_sizes() -> None:
    rng = np.random.default_rng(0)
    for sizes in ((700, 20), (64, 129), (1500,), (3, 5, 7)):
        tokens = [rng.integers(0, VOCABULARY, size) for size in sizes]
        rows = [row_of(str(i), each, len(each) // 2, i) for i, each in enumerate(tokens)]
        on_host, batch = (pack(rows, device) for device in (CPU, CUDA))
        states = [torch.randn(len(batch.packed.reach), heads, 64) for heads in (4, 2, 2)]
        expected = attended(tree_attention, on_host, [each.double() for each in states], None)
        found = attended(flex, batch, [each.to(CUDA) for each in states], None)
        assert max(apart(one, other) for one, other in zip(found, expected, strict=True)) < 2e-5


@pytest.mark.parametrize("bfloat16", [False, True])
def test_log_probabilities_keep_float32_sums(bfloat16: bool) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 128), 0.2 * torch.randn(5000, 128)
    targets = torch.randint(0, 5000, (300,))
    results = []
    for device, dtype in ((CPU, torch.float64), (CUDA, torch.float32)):
        states, matrix = hidden, weight
        if bfloat16:
            states, matrix = states.bfloat16(), matrix.bfloat16()
        states = states.to(device, dtype).requires_grad_()
        matrix = matrix.to(device, dtype).requires_grad_()
        logprobs, entropy = token_logprobs(
            states, matrix, targets.to(device), temperature=1.3, chunk_tokens=128,
            bfloat16=bfloat16 and device == CUDA,
        )  # fmt: skip
        (logprobs - 0.1 * entropy).sum().backward()
        results.append([each.detach().cpu().double() for each in (logprobs, entropy)])
        results[-1] += [states.grad.cpu().double(), matrix.grad.cpu().double()]
    expected, found = results
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert float((one - other).abs().max()) < 2e-5
    for one, other in zip(found[2:], expected[2:], strict=True):
        assert apart(one, other) < (1e-2 if bfloat16 else 1e-5)  # gradients of logits are rounded


def stepped(policy: PolicyModel, strategy: Any = None) -> tuple[dict[str, torch.Tensor], float]:
    """Weights on the host and the loss after two steps."""
    given = config(training_args=ARGS, max_tokens_per_micro_batch=60)
    if strategy is None:
        optimizer, ranks = SummedOptimizer.of(policy.parameters, ARGS), ONE_RANK
    else:
        policy = strategy.spread(policy)
        optimizer, ranks = strategy.make_optimizer(policy, ARGS), strategy.ranks
    trainer = StepTrainer(policy, optimizer, given, groups_per_step=3, max_steps=8, ranks=ranks)
    for step in range(2):
        trainer.begin(step)
        for rows in (group_rows(1 + step, 6), episode_rows(5 + step), group_rows(11 + step, 3)):
            trainer.add(prepared(copy.deepcopy(rows)))
            trainer.work()
        loss = trainer.finish()["loss"]
    assert loss is not None
    whole = strategy.whole if strategy else lambda parameter: parameter
    named = policy.model.named_parameters()
    return {name: whole(each).detach().cpu().float().clone() for name, each in named}, loss


def policy_on(device: torch.device, *, autocast: bool = False) -> PolicyModel:
    """A small policy with heads as wide as the compiled kernel needs."""
    attention.register()
    torch.manual_seed(0)
    architecture = Qwen3Config(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, intermediate_size=96, max_position_embeddings=128,
        initializer_range=0.2,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(architecture, attn_implementation=attention.IMPLEMENTATION)
    return PolicyModel(model.train().to(device), device, 1.0, 7, autocast=autocast)


def start() -> dict[str, torch.Tensor]:
    """Weights before the first step."""
    named = policy_on(CPU).model.named_parameters()
    return {name: each.detach().clone() for name, each in named}


def astray(weights: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Norm of the difference, as a share of the way that the weights went."""
    before = start()
    found, wanted, first = (
        torch.cat([each[name].flatten() for name in before]) for each in (weights, expected, before)
    )
    return float((found - wanted).norm() / (wanted - first).norm())


def test_steps_move_the_weights_as_on_the_cpu() -> None:
    expected, expected_loss = stepped(policy_on(CPU))
    weights, loss = stepped(policy_on(CUDA))
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert astray(weights, expected) < 1e-2


def test_bfloat16_steps_stay_within_its_rounding() -> None:
    expected, expected_loss = stepped(policy_on(CPU))
    weights, loss = stepped(policy_on(CUDA, autocast=True))
    assert loss == pytest.approx(expected_loss, abs=5e-3)
    assert astray(weights, expected) < 0.3


@pytest.mark.timeout(180)
def test_fsdp2_over_nccl_trains_as_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, expected_loss = stepped(policy_on(CUDA))
    place = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_PORT": free_port()}
    for key, value in {"MASTER_ADDR": "127.0.0.1", **place}.items():
        monkeypatch.setenv(key, str(value))
    ranks = TorchRanks(StrategyArgs(num_ranks=1, timeout_s=60.0), CUDA)
    try:
        policy = dataclasses.replace(policy_on(CPU), device=CUDA)  # cut on its way to the device
        weights, loss = stepped(policy, Fsdp2Strategy(ranks, CUDA))
    finally:
        ranks.leave()
    assert loss == pytest.approx(expected_loss, rel=1e-4)
    assert astray(weights, expected) < 1e-2


def test_memory_on_loan_is_free_on_the_device_and_comes_back_unchanged() -> None:
    weights = torch.randn(64 << 20, device=CUDA)
    view, before = weights[1000:], weights[:5000].clone()
    held = torch.cuda.memory_reserved()
    offload = Offload()
    offload.free([weights], keep=True)
    freed = held - torch.cuda.memory_reserved()
    assert freed >= 4 * (64 << 20)
    offload.restore()
    assert torch.equal(weights[:5000], before)
    assert torch.equal(view[:4000], before[1000:])


def test_a_sleeping_learner_gives_the_memory_of_its_device_back() -> None:
    weight = torch.nn.Parameter(torch.ones(1024, 1024, device=CUDA))
    optimizer = SummedOptimizer.of([weight], ARGS)
    weight.grad = torch.ones_like(weight)
    optimizer.update(count=1.0, learning_rate=1e-2, max_grad_norm=0.0)
    expected = [each.detach().cpu() for each in (weight, *optimizer.moments(weight).values())]
    awake = torch.cuda.memory_allocated()
    memory = WorkerMemory([weight, optimizer], CUDA)
    memory.free()
    assert torch.cuda.memory_allocated() <= awake - 12 * MIB  # the weight and two moments
    memory.restore()
    found = [each.detach().cpu() for each in (weight, *optimizer.moments(weight).values())]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_model_that_waits_to_be_cut_is_checked_on_the_gpu_and_stays_on_the_host() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
    shape = Qwen3Config(vocab_size=VOCABULARY, num_hidden_layers=6, num_key_value_heads=2, **sizes)
    model: Any = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
    before = {name: (each, each.clone()) for name, each in model.named_parameters()}
    devices: set[str] = set()
    hook = model.model.layers[1].register_forward_pre_hook(
        lambda module, args: devices.add(args[0].device.type)
    )
    path = pick_path(model, LearnerConfig(device="cuda", strategy_args=StrategyArgs(num_ranks=2)))
    hook.remove()
    assert (path.name, devices, len(model.model.layers)) == ("shared", {"cuda"}, 6)
    for name, each in model.named_parameters():
        assert each is before[name][0]
        assert each.device == CPU
        assert torch.equal(each, before[name][1])
