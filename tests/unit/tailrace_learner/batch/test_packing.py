"""Packing, micro-batching and order change nothing; chunked log-probabilities are the full ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tailrace_learner.core.algorithms import LOSSES
from tailrace_learner.core.batch.packing import micro_batches, pack
from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.model.attention import UnsupportedAttentionError
from tailrace_learner.core.model.logprobs import MAX_KEPT_RATIO, token_logprobs
from tailrace_learner.core.model.policy import PolicyModel, StartWeights
from tailrace_learner.core.step.metric_sums import MetricSums
from tailrace_learner.core.step.passes import PassRunner
from tests.unit.tailrace_learner.factory import CPU, config, make_model, make_policy, make_rows
from tests.unit.tailrace_learner.stepping import distance

FAMILIES = ["qwen3", "qwen2", "llama"]


def gradients(policy: PolicyModel, batches: Sequence[Sequence[TrainingRow]]) -> torch.Tensor:
    """All summed gradients after passes over `batches`, flat."""
    policy.model.zero_grad(set_to_none=True)
    runner = PassRunner(policy, LOSSES["dapo"], config(), StartWeights(policy.parameters))
    for batch in batches:
        runner.run(batch, MetricSums(), is_first=True)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_logits_of_rows_alone(family: str) -> None:
    policy = make_policy(family)
    plain = make_model(family, "eager")
    rows = make_rows(12, seed=1)
    batch = pack(rows, CPU)
    learner_logprobs, entropy = policy.forward(batch)
    for row, start, stop in zip(
        batch.rows, batch.target_offsets, batch.target_offsets[1:], strict=False
    ):
        logits = plain(input_ids=torch.from_numpy(row.token_ids)[None], use_cache=False).logits[0]
        log_all = torch.log_softmax(logits[row.targets - 1], -1)
        expected = log_all.gather(-1, torch.from_numpy(row.target_ids)[:, None])[:, 0]
        torch.testing.assert_close(learner_logprobs[start:stop], expected, rtol=1e-5, atol=1e-5)
        expected_entropy = -(log_all.exp() * log_all).sum(-1)
        torch.testing.assert_close(entropy[start:stop], expected_entropy, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_do_not_depend_on_micro_batches_packing_or_order(family: str) -> None:
    policy = make_policy(family)
    rows = make_rows(15, seed=2)
    whole = gradients(policy, [rows])
    assert distance(gradients(policy, [[row] for row in rows]), whole) < 1e-5
    shuffled = [rows[index] for index in np.random.default_rng(0).permutation(len(rows))]
    assert distance(gradients(policy, [shuffled[:4], shuffled[4:]]), whole) < 1e-5
    assert distance(gradients(policy, list(micro_batches(shuffled, 40))), whole) < 1e-5


def test_a_sliding_window_reaches_only_its_tokens() -> None:
    model = make_model("qwen3", "eager")
    packed = make_policy("qwen3")
    for each in (model, packed.model):
        for layer in each.model.layers:
            layer.self_attn.sliding_window = 3
    rows = make_rows(3, seed=4, max_len=12)
    batch = pack(rows, CPU)
    states = packed.model.model(
        input_ids=batch.input_ids,
        position_ids=batch.position_ids,
        packed_rows=batch.packed,
        use_cache=False,
    ).last_hidden_state[0]
    starts = batch.packed.cu_seqlens.tolist()
    for row, start, stop in zip(batch.rows, starts, starts[1:], strict=False):
        size = len(row.token_ids)
        distance = torch.arange(size)[:, None] - torch.arange(size)[None, :]
        mask = torch.where((distance >= 0) & (distance < 3), 0.0, -1e9)[None, None]
        expected = model.model(
            input_ids=torch.from_numpy(row.token_ids)[None],
            attention_mask={"full_attention": mask},
            use_cache=False,
        ).last_hidden_state[0]
        torch.testing.assert_close(states[start:stop], expected, rtol=1e-4, atol=1e-5)


def test_attention_without_row_boundaries_is_refused() -> None:
    model = make_model()
    with pytest.raises(UnsupportedAttentionError, match="got no boundaries of rows"):
        model(input_ids=torch.zeros((1, 4), dtype=torch.long))


def test_micro_batches_hold_every_row_once_within_the_bound() -> None:
    rows = make_rows(40, seed=6)
    batches = list(micro_batches(rows, 30))
    assert sorted(row.row_id for batch in batches for row in batch) == sorted(
        row.row_id for row in rows
    )
    assert all(sum(len(row.token_ids) for row in batch) <= 30 for batch in batches)
    assert [len(batch) for batch in micro_batches(rows, 1)] == [1] * 40


@pytest.mark.parametrize("chunk_tokens", [1, 3, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("vocab_size", [17, 8 * MAX_KEPT_RATIO, 8 * MAX_KEPT_RATIO + 1])
def test_chunked_logprobs_and_their_gradients_are_the_full_ones(
    chunk_tokens: int, temperature: float, vocab_size: int
) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab_size, 8, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, vocab_size, (11,))
    upstream = torch.randn(2, 11)

    log_all = torch.log_softmax((hidden @ weight.t()).float() / temperature, -1)
    expected = (log_all.gather(-1, targets[:, None])[:, 0], -(log_all.exp() * log_all).sum(-1))
    ((expected[0] * upstream[0]).sum() + (expected[1] * upstream[1]).sum()).backward()
    wanted = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None

    found = token_logprobs(hidden, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    ((found[0] * upstream[0]).sum() + (found[1] * upstream[1]).sum()).backward()
    for left, right in zip([*found, hidden.grad, weight.grad], [*expected, *wanted], strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6, check_dtype=False)


@pytest.mark.parametrize("is_trained", [True, False])
@pytest.mark.parametrize("vocab_size", [17, 8 * MAX_KEPT_RATIO + 1])
def test_bfloat16_rounds_the_factors_of_logits_and_no_sum(vocab_size: int, is_trained: bool) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(600, 8, requires_grad=True)
    weight = torch.randn(vocab_size, 8, requires_grad=is_trained)
    targets = torch.randint(0, vocab_size, (600,))
    upstream = torch.randn(600, dtype=torch.float64)

    factors = [each.detach().bfloat16().double().requires_grad_() for each in (hidden, weight)]
    logits = factors[0] @ factors[1].t()
    expected = torch.log_softmax(logits, -1).gather(-1, targets[:, None])[:, 0]
    (expected * upstream).sum().backward()

    found, entropy = token_logprobs(
        hidden, weight, targets, temperature=1.0, chunk_tokens=3, bfloat16=True
    )
    assert found.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    (found * upstream.float()).sum().backward()
    assert distance(hidden.grad, factors[0].grad) < 5e-3
    if not is_trained:
        assert weight.grad is None
        return
    # Sums of 200 chunks: kept in bfloat16 they would be wrong by more than a percent.
    assert weight.grad.dtype == torch.float32
    assert distance(weight.grad, factors[1].grad) < 5e-3


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_hugging_faces_own_attention_sees_the_row_boundaries_too(implementation: str) -> None:
    rows = make_rows(6, seed=7)
    batch = pack(rows, CPU)
    expected = make_policy().forward(batch)
    theirs = PolicyModel(make_model("qwen3", implementation), CPU, 1.0, 64).forward(batch)
    torch.testing.assert_close(theirs, expected, rtol=1e-4, atol=1e-5)


def test_bfloat16_activations_stay_near_float32() -> None:
    batch = pack(make_rows(6, seed=9), CPU)
    expected, _ = make_policy().forward(batch)
    narrow, _ = dataclasses.replace(make_policy(), autocast=True).forward(batch)
    assert narrow.dtype == torch.float32
    assert 0 < float((narrow - expected).detach().abs().max()) < 0.2  # of log-probabilities
