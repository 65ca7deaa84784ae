"""Sharing prefixes changes no log-probability, no gradient and no step: only how often tokens occur."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tailrace_learner.config import ModelArgs, TrainingArgs
from tailrace_learner.core.algorithms import LOSSES
from tailrace_learner.core.batch import layout
from tailrace_learner.core.batch.packing import micro_batches, pack
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow
from tailrace_learner.core.cpu.short_attention import MAX_LEN, is_short, short_attention
from tailrace_learner.core.cpu.tree_attention import tree_attention
from tailrace_learner.core.model.bucket_attention import bucket_attention
from tailrace_learner.core.model.flex import block_mask, flex, visible
from tailrace_learner.core.model.policy import PolicyModel, StartWeights
from tailrace_learner.core.step.metric_sums import MetricSums
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.passes import PassRunner
from tailrace_learner.core.step.step import StepTrainer
from tests.unit.tailrace_learner.factory import (
    CPU,
    VOCABULARY,
    config,
    make_double_policy,
    make_model,
    make_policy,
    make_rows,
)
from tests.unit.tailrace_learner.stepping import distance

PROMPT_LEN = 11


@pytest.fixture(params=[0, 30, 64], ids=["by_segments", "by_both", "by_rows"])
def longest_whole_row(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Up to which length rows are attended whole; those of the tests have 15 to 40 tokens."""
    limit: int = request.param
    monkeypatch.setattr(layout, "MAX_WHOLE_ROW", limit)
    return limit


LAYOUTS = pytest.mark.usefixtures("longest_whole_row")


def row_of(name: str, token_ids: NDArray[np.int64], first_target: int, seed: int) -> TrainingRow:
    """A row that trains everything from `first_target` on."""
    rng = np.random.default_rng(seed)
    targets = np.arange(first_target, len(token_ids))
    return TrainingRow(
        row_id=name,
        token_ids=token_ids[:-1],
        targets=targets,
        target_ids=token_ids[targets],
        inference_logprobs=rng.normal(-3.0, 1.0, len(targets)).astype(np.float32),
        advantages=rng.normal(0.0, 1.0, len(targets)).astype(np.float32),
        staleness=np.zeros(len(targets), np.int64),
        is_current=np.ones(len(targets), np.bool_),
        turns=np.arange(len(targets)) // 3,
    )


def group_rows(group: int, num_rows: int = 4) -> list[TrainingRow]:
    """Answers to one prompt, of different lengths; all but the first begin alike for long."""
    rng = np.random.default_rng(group)
    prompt = rng.integers(0, VOCABULARY, PROMPT_LEN)
    opening = rng.integers(0, VOCABULARY, 9)
    answers = [rng.integers(0, VOCABULARY, rng.integers(2, 9)) for _ in range(num_rows)]
    rows = [np.concatenate((prompt, opening if i else [], each)) for i, each in enumerate(answers)]
    return [
        row_of(f"g{group}.{index}", row.astype(np.int64), PROMPT_LEN, group * 10 + index)
        for index, row in enumerate(rows)
    ]


def episode_rows(seed: int) -> list[TrainingRow]:
    """The turns of an episode, each reading all before it, and a fork of the second."""
    rng = np.random.default_rng(seed)
    episode = rng.integers(0, VOCABULARY, 40)
    fork = np.concatenate((episode[:18], rng.integers(0, VOCABULARY, 5)))
    rows = [(episode[:14], 10), (episode[:24], 20), (episode, 36), (fork, 18)]
    return [row_of(f"e{seed}.{i}", row, first, seed + i) for i, (row, first) in enumerate(rows)]


def mixed_rows() -> list[TrainingRow]:
    return [*group_rows(1), *make_rows(3, seed=3), *episode_rows(5), *group_rows(2, 3)]


def gradients(
    policy: PolicyModel, batches: Sequence[Sequence[TrainingRow]], shares: bool, **given: Any
) -> torch.Tensor:
    policy.model.zero_grad(set_to_none=True)
    settings = config(share_prefixes=shares, entropy_loss_coef=0.1, **given)
    runner = PassRunner(policy, LOSSES["dapo"], settings, StartWeights(policy.parameters))
    for batch in batches:
        runner.run(batch, MetricSums(), is_first=True)
    return torch.cat([parameter.grad.flatten() for parameter in policy.parameters])


@LAYOUTS
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_log_probabilities_and_entropies_are_those_of_rows_alone(family: str) -> None:
    policy = make_policy(family)
    rows = mixed_rows()
    batch = pack(rows, CPU, share_prefixes=True)
    assert batch.input_ids.numel() < sum(len(row.token_ids) for row in rows) - 60
    learner_logprobs, entropy = policy.forward(batch)
    for row, start, stop in zip(
        batch.rows, batch.target_offsets, batch.target_offsets[1:], strict=False
    ):
        expected = policy.forward(pack([row], CPU))
        found = (learner_logprobs[start:stop], entropy[start:stop])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@LAYOUTS
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama"])
def test_gradients_are_those_without_sharing_whatever_the_micro_batches(family: str) -> None:
    policy = make_policy(family)
    rows = mixed_rows()
    expected = gradients(policy, [[row] for row in rows], shares=False)
    assert distance(gradients(policy, [rows], shares=True), expected) < 1e-5
    for limit in (20, 60):
        parts = list(micro_batches(rows, limit, share_prefixes=True))
        assert len(parts) > 1
        assert distance(gradients(policy, parts, shares=True), expected) < 1e-5


@LAYOUTS
def test_in_float64_sharing_is_exact_to_its_last_digits() -> None:
    policy = make_double_policy()
    rows = mixed_rows()
    expected = gradients(policy, [[row] for row in rows], shares=False)
    assert expected.dtype == torch.float64
    assert distance(gradients(policy, [rows], shares=True), expected) < 1e-12


def test_gradient_checkpointing_and_sharing_go_together() -> None:
    policy = make_policy()
    expected = gradients(policy, [mixed_rows()], shares=True)
    policy.model.gradient_checkpointing_enable({"use_reentrant": False})
    assert distance(gradients(policy, [mixed_rows()], shares=True), expected) < 1e-6


@LAYOUTS
@pytest.mark.parametrize("window", [3, 13])
def test_a_sliding_window_looks_back_into_shared_prefixes_as_far_as_it_reaches(window: int) -> None:
    policy = make_policy()
    for layer in policy.model.model.layers:
        layer.self_attn.sliding_window = window
    rows = mixed_rows()
    expected = gradients(policy, [[row] for row in rows], shares=False)
    assert distance(gradients(policy, [rows], shares=True), expected) < 1e-5
    for layer in policy.model.model.layers:
        layer.self_attn.sliding_window = None
    assert distance(gradients(policy, [rows], shares=True), expected) > 1e-3


def states(num_tokens: int, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Queries, keys and values with half as many heads."""
    torch.manual_seed(0)
    sizes = (4, 2, 2)
    return [torch.randn(num_tokens, heads, 8, dtype=dtype, requires_grad=True) for heads in sizes]


def continued_rows() -> list[TrainingRow]:
    """Episodes of two turns that share nothing with each other: every first turn begins the second."""
    rng = np.random.default_rng(0)
    rows = []
    for index, size in enumerate((40, 60, 42, 21, 58, 22)):
        episode = np.concatenate(([index], rng.integers(0, VOCABULARY, size - 1)))
        rows.append(row_of(f"{index}.1", episode[: size // 2], size // 2 - 3, index))
        rows.append(row_of(f"{index}.2", episode, size - 4, index + 50))
    return rows


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("shares", [True, False])
def test_pieces_give_the_attention_and_gradients_of_the_whole_mask(
    window: int | None, shares: bool, longest_whole_row: int
) -> None:
    packed = pack(mixed_rows(), CPU, share_prefixes=shares).packed
    assert bool(packed.branches) == (shares and longest_whole_row < 64)
    assert any(bucket.repeats for bucket in packed.buckets) == (shares and longest_whole_row > 0)
    assert is_short(packed) == (not packed.branches)
    computed: list[Any] = [tree_attention]
    computed += [] if shares else [bucket_attention]
    computed += [short_attention] if is_short(packed) else []
    check_attention(packed, window, computed)


@pytest.mark.parametrize("window", [None, 6])
def test_turns_that_only_continue_each_other_need_no_branches_anywhere(window: int | None) -> None:
    rows = continued_rows()
    packed = pack(rows, CPU, share_prefixes=True).packed
    assert not packed.branches
    assert len(packed.cu_seqlens) - 1 == len(rows) / 2
    check_attention(packed, window, [tree_attention, bucket_attention, flex], gradients=False)
    check_attention(packed, window, [tree_attention, bucket_attention])


def check_attention(
    packed: layout.PackedRows, window: int | None, computed: Sequence[Any], *, gradients: bool = True
) -> None:
    """Each of `computed` gives what torch gives with the whole mask, in float64."""
    size = len(packed.reach)
    query, key, value = states(size)
    places = torch.arange(size)
    none = torch.zeros((), dtype=torch.long)
    mask = visible(packed, window)(none, none, places[:, None], places[None, :])
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(0, 1)[None] for each in (query, key, value)), attn_mask=mask, enable_gqa=True
    )[0].transpose(0, 1)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (query, key, value), upstream)
    for compute in computed:
        if not gradients:
            query, key, value = (each.detach() for each in (query, key, value))
        found = compute(query, key, value, packed, scale=None, window=window)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
        if not gradients:
            continue
        grads = torch.autograd.grad(found, (query, key, value), upstream)
        torch.testing.assert_close(grads, wanted, rtol=1e-10, atol=1e-10)


@LAYOUTS
def test_a_segment_alone_in_its_bucket_is_attended_for_and_what_is_before_it_only_seen() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, PROMPT_LEN)
    sizes = (4, 40)  # too different for one bucket; the first lies right behind the prompt
    rows = [
        row_of(
            str(size),
            np.concatenate((prompt, [size // 2], rng.integers(0, VOCABULARY, size))),
            PROMPT_LEN + 1,
            size,
        )
        for size in sizes
    ]
    shared = pack(rows, CPU, share_prefixes=True)
    policy = make_policy()
    found, expected = policy.forward(shared), policy.forward(pack(rows, CPU))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_longer_sequence_is_left_to_the_fused_kernel() -> None:
    assert is_short(layout.lone_tokens([3, MAX_LEN], CPU))
    assert not is_short(layout.lone_tokens([3, MAX_LEN + 1], CPU))


@LAYOUTS
@pytest.mark.parametrize("window", [None, 6])
def test_the_block_mask_of_other_devices_sees_the_same(window: int | None) -> None:
    packed = pack(mixed_rows(), CPU, share_prefixes=True).packed
    query, key, value = (each.detach().float() for each in states(len(packed.reach)))
    expected = tree_attention(query, key, value, packed, scale=0.3, window=window)
    found = flex(query, key, value, packed, scale=0.3, window=window)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("shares", [True, False])
def test_blocks_that_are_left_out_hold_nothing_and_whole_ones_all(
    window: int | None, shares: bool
) -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCABULARY, 300)
    sizes = (170, 420, 30)
    answers = [
        np.concatenate((prompt, [i], rng.integers(0, VOCABULARY, n))) for i, n in enumerate(sizes)
    ]
    rows = [row_of(str(index), row, 301, index) for index, row in enumerate(answers)]
    packed = pack(rows, CPU, share_prefixes=shares).packed
    found = block_mask(packed, window)
    size = len(packed.reach)
    expected = create_block_mask(visible(packed, window), None, None, size, size, device="cpu")
    seen, whole = (_blocks(found, each) for each in ("kv", "full_kv"))
    assert torch.equal(whole, _blocks(expected, "full_kv"))
    assert whole.any()
    assert not (seen & whole).any()
    needed = _blocks(expected, "kv")
    assert (seen | whole | ~needed).all()
    assert seen.sum() <= 1.2 * needed.sum(), "hardly more than what is needed"


def _blocks(mask: BlockMask, kind: str) -> torch.Tensor:
    """[Q, K] which blocks the mask lists."""
    counts, columns = (getattr(mask, f"{kind}_{what}")[0, 0] for what in ("num_blocks", "indices"))
    flags = torch.zeros(columns.shape, dtype=torch.bool)
    for row, (count, listed) in enumerate(zip(counts.tolist(), columns, strict=True)):
        flags[row, listed[:count].long()] = True
    return flags


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("window", [None, 6])
def test_key_heads_that_query_heads_share_are_repeated_only_where_they_must(
    dtype: torch.dtype, window: int | None
) -> None:
    packed = pack(mixed_rows(), CPU).packed
    query, key, value = (each.detach().to(dtype) for each in states(len(packed.reach)))
    expected = tree_attention(
        *(each.double() for each in (query, key, value)), packed, scale=None, window=window
    )
    found = bucket_attention(query, key, value, packed, scale=None, window=window)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_rows_of_a_tree_stay_together_and_shared_tokens_count_once() -> None:
    rows = [row for group in range(6) for row in group_rows(group)]
    shuffled = [rows[index] for index in np.random.default_rng(0).permutation(len(rows))]
    parts = list(micro_batches(shuffled, 120, share_prefixes=True))
    assert sorted(row.row_id for part in parts for row in part) == sorted(row.row_id for row in rows)
    assert all(pack(part, CPU, share_prefixes=True).input_ids.numel() <= 120 for part in parts)
    groups = [{row.row_id.split(".")[0] for row in part} for part in parts]
    assert sum(len(names) for names in groups) == 6
    assert len(parts) < len(list(micro_batches(shuffled, 120)))


def test_a_tree_beyond_the_bound_is_cut_within_it() -> None:
    rows = group_rows(1, 12)
    parts = list(micro_batches(rows, 40, share_prefixes=True))
    assert len(parts) > 1
    assert sum(len(part) for part in parts) == 12
    sizes = [pack(part, CPU, share_prefixes=True).input_ids.numel() for part in parts]
    assert max(sizes) <= 40


def stepped(shares: bool, **settings: Any) -> torch.Tensor:
    """Weights after a step of two groups and an episode's turns."""
    policy = make_policy()
    # A small epsilon would make updates of gradients that are rounding errors as large as any.
    args = TrainingArgs(learning_rate=1e-2, max_grad_norm=0.5, adam_epsilon=1e-3)
    given = config(share_prefixes=shares, training_args=args, **settings)
    optimizer = SummedOptimizer.of(policy.parameters, args)
    trainer = StepTrainer(policy, optimizer, given, groups_per_step=3, max_steps=10)
    trainer.begin(0)
    for index, rows in enumerate((group_rows(1), episode_rows(5), group_rows(2))):
        group = PreparedGroup(f"g{index}", index, tuple(copy.deepcopy(rows)), "", (1.0,), (1.0,))
        trainer.add(group)
        trainer.work()
    trainer.finish()
    return torch.cat([parameter.detach().flatten() for parameter in policy.parameters])


@LAYOUTS
def test_a_step_is_the_same_with_and_without_sharing_however_rows_are_attended() -> None:
    check_step()


@pytest.mark.parametrize(
    "settings",
    [
        {"num_mini_batches": 3, "loss": "dapo", "ppo_epochs": 2},
        {"max_tokens_per_micro_batch": 30, "loss": "clip_cov"},
        {"loss_aggregation": "seq_mean_token_mean", "entropy_loss_coef": 0.01},
        {"num_mini_batches": 3, "loss": "gspo", "gspo_clip": 0.1},
        {"num_mini_batches": 3, "loss": "segment", "ppo_epochs": 2},
        {"num_mini_batches": 3, "loss": "topr", "behaviour_correction": "none"},
    ],
)
def test_a_step_is_the_same_with_and_without_sharing(settings: dict[str, Any]) -> None:
    check_step(**settings)


def check_step(**settings: Any) -> None:
    shared, alone = stepped(True, **settings), stepped(False, **settings)
    start = torch.cat([parameter.detach().flatten() for parameter in make_policy().parameters])
    assert not torch.equal(alone, start)
    assert distance(shared, alone) < 1e-5


@pytest.mark.parametrize(("shares", "num_tokens"), [(True, 35), (False, 86)])
def test_the_setting_decides_how_many_tokens_are_computed(shares: bool, num_tokens: int) -> None:
    policy = make_policy()
    seen: list[int] = []
    embedding = policy.model.get_input_embeddings()
    embedding.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].numel()))
    gradients(policy, [group_rows(1)], shares)
    assert seen == [num_tokens]


def test_other_implementations_of_attention_share_nothing() -> None:
    args = ModelArgs(attn_implementation="eager")
    policy = replace(make_policy(), model=make_model("qwen3", "eager"))
    rows = mixed_rows()
    expected = gradients(make_policy(), [rows], shares=False)
    assert distance(gradients(policy, [rows], True, model_args=args), expected) < 1e-5
