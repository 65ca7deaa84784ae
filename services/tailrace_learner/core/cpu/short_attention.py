"""Attention of short sequences on the CPU, by batched matrix products.

Sequences of a few dozen tokens are too small for the fused kernel's blocks. Their probabilities are
small, so they are kept, and the backward pass is five products over what the forward pass left (4
groups of 8 rows, 31 tokens after a prompt of 13 to 18, 4 heads of 32: 4.1 ms against 7.4). Query
heads that share a key head are rows of one product. `short_plan` plans the places.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from tailrace_learner.core.batch.layout import PackedRows
from tailrace_learner.core.cpu.short_plan import Heads, ShortPlan, plan_of

# Longer sequences are left to the fused kernel.
MAX_LEN = 64

_softmax_backward = torch.ops.aten._softmax_backward_data.out


def short_attention(
    query: Tensor,  # [N, H, D]
    key: Tensor,  # [N, KH, D]
    value: Tensor,  # [N, KH, D]
    packed: PackedRows,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention output [N, H, D]; a token attends to `window` tokens back, itself included."""
    repeats = query.shape[1] // key.shape[1]
    plan = plan_of(packed, Heads(key.shape[1], repeats, window, query.dtype))
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output: Tensor = _ShortAttention.apply(query, key, value, plan, scale)  # type: ignore[no-untyped-call]
    return output


def is_short(packed: PackedRows) -> bool:
    """Tells whether all sequences are short and none attends to others."""
    return not packed.branches and max(bucket.max_len for bucket in packed.buckets) <= MAX_LEN


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: ShortPlan, scale: float
    ) -> Tensor:
        shape, (kv_heads, head_dim) = query.shape, key.shape[1:]
        query = _gathered(query, kv_heads, plan.queries)
        key, value = (_gathered(states, kv_heads, plan.keys) for states in (key, value))
        output = torch.empty_like(query)
        kept = []
        for part, q, out, k, v in _by_part(plan, head_dim, (query, output), (key, value)):
            scores = torch.baddbmm(part.mask, q, k.transpose(1, 2).contiguous(), alpha=scale)
            probabilities = torch.softmax(scores, -1, out=scores)
            torch.bmm(probabilities, v, out=out)
            kept.append(probabilities)
        ctx.save_for_backward(query, key, value, *kept)
        ctx.given = plan, scale, kv_heads
        return output.index_select(0, plan.query_of).view(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, scale, kv_heads = ctx.given
        query, key, value, *kept = ctx.saved_tensors
        upstream = _gathered(grads[0], kv_heads, plan.queries)
        if len(plan.hollow):
            upstream.index_fill_(0, plan.hollow, 0.0)
        of_query, of_key, of_value = (torch.empty_like(states) for states in (query, key, value))
        parts = _by_part(
            plan, key.shape[1], (query, upstream, of_query), (key, value, of_key, of_value)
        )
        for probabilities, (_, q, up, of_q, k, v, of_k, of_v) in zip(kept, parts, strict=True):
            torch.bmm(probabilities.transpose(1, 2), up, out=of_v)
            upon = torch.bmm(up, v.transpose(1, 2).contiguous())
            _softmax_backward(upon, probabilities, -1, upon.dtype, grad_input=upon)
            torch.baddbmm(of_q, upon, k, beta=0.0, alpha=scale, out=of_q)
            torch.baddbmm(of_k, upon.transpose(1, 2), q, beta=0.0, alpha=scale, out=of_k)
        found = (_summed(states, plan, kv_heads) for states in (of_key, of_value))
        return of_query.index_select(0, plan.query_of).view(grads[0].shape), *found, None, None


def _gathered(states: Tensor, kv_heads: int, places: Tensor) -> Tensor:
    """States at every place, [P, R * D], of `states` [N, R * KH, D]."""
    return states.reshape(states.shape[0] * kv_heads, -1).index_select(0, places)


def _by_part(
    plan: ShortPlan, head_dim: int, queries: Sequence[Tensor], keys: Sequence[Tensor]
) -> Iterator[tuple[Any, ...]]:
    """Each part with views of its queries [B * KH, Q * R, D] and of its keys [B * KH, K, D]."""
    at_queries = [states.split_with_sizes(plan.query_sizes) for states in queries]
    at_keys = [states.split_with_sizes(plan.key_sizes) for states in keys]
    repeats = queries[0].shape[1] // head_dim
    for part, *found in zip(plan.parts, *at_queries, *at_keys, strict=True):
        lengths = [part.num_queries * repeats] * len(queries) + [part.num_keys] * len(keys)
        views = (x.view(-1, length, head_dim) for x, length in zip(found, lengths, strict=True))
        yield part, *views


def _summed(places: Tensor, plan: ShortPlan, kv_heads: int) -> Tensor:
    """Sum over all places of a token, [N, KH, D]."""
    tokens = places.index_select(0, plan.key_of)
    if len(plan.seen):
        tokens.index_add_(0, plan.seen_tokens, places.index_select(0, plan.seen))
    return tokens.view(-1, kv_heads, places.shape[1])
