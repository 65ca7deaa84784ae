"""Attention of short sequences on the CPU, by batched matrix products.

Sequences of a few dozen tokens are too little for the fused kernel's blocks. Their probabilities are
small, so they are kept, and the backward pass is five products over what the forward pass left (32 rows
of 49 tokens, 4 heads of 32: 1.4 ms against 2.2). Query heads that share a key head are rows of one
product.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tailrace_learner.core.layout import Bucket, PackedRows

# Longer sequences are left to the fused kernel.
MAX_LEN = 64

_softmax_backward = torch.ops.aten._softmax_backward_data


def short_attention(
    query: Tensor,  # [N, H, D]
    key: Tensor,  # [N, KH, D]
    value: Tensor,  # [N, KH, D]
    packed: PackedRows,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention output [N, H, D]; `window` bounds how many tokens back one sees, itself included."""
    plan = _plan(packed, query, key, window)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output: Tensor = _ShortAttention.apply(query, key, value, plan, scale)  # type: ignore[no-untyped-call]
    return output


def is_short(packed: PackedRows) -> bool:
    """Whether all sequences are, and each sees only itself."""
    return not packed.branches and max(bucket.max_len for bucket in packed.buckets) <= MAX_LEN


class _Part(NamedTuple):
    """A bucket's B sequences of length L, once per key head: places [start, stop) of all."""

    start: int
    stop: int
    length: int
    mask: Tensor  # [L * R, L] added to the scores of R query heads per key head


class _Plan(NamedTuple):
    """Where the flat tokens of each key head lie among the places of all buckets."""

    parts: tuple[_Part, ...]
    places: Tensor  # [P] which of the N * KH tokens is at each place
    origin: Tensor  # [N * KH] the place where each token is attended for
    hollow: Tensor  # [p] places of padding and of tokens that are there to be seen only


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan, scale: float
    ) -> Tensor:
        dense = [_gathered(states, plan, key.shape[1]) for states in (query, key, value)]
        output = torch.empty_like(dense[0])
        kept = []
        for part in plan.parts:
            q, k, v = (_sequences(states, part, key.shape[2]) for states in dense)
            scores = torch.baddbmm(part.mask, q, k.transpose(1, 2).contiguous(), alpha=scale)
            probabilities = scores.softmax(-1)
            torch.bmm(probabilities, v, out=_sequences(output, part, v.shape[2]))
            kept.append(probabilities)
        ctx.save_for_backward(*dense, *kept)
        ctx.given = plan, scale, key.shape[1]
        return output.index_select(0, plan.origin).view(query.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        plan, scale, kv_heads = ctx.given
        query, key, value, *kept = ctx.saved_tensors
        upstream = _gathered(grads[0], plan, kv_heads).index_fill_(0, plan.hollow, 0.0)
        found = [torch.empty_like(states) for states in (query, key, value)]
        for part, probabilities in zip(plan.parts, kept, strict=True):
            size = key.shape[1]
            q, k, v, up = (_sequences(states, part, size) for states in (query, key, value, upstream))
            of_q, of_k, of_v = (_sequences(states, part, size) for states in found)
            torch.bmm(probabilities.transpose(1, 2), up, out=of_v)
            upon = torch.bmm(up, v.transpose(1, 2).contiguous())
            upon = _softmax_backward(upon, probabilities, -1, upon.dtype)
            torch.baddbmm(of_q, upon, k, beta=0.0, alpha=scale, out=of_q)
            torch.baddbmm(of_k, upon.transpose(1, 2), q, beta=0.0, alpha=scale, out=of_k)
        shape = grads[0].shape
        of_query = found[0].index_select(0, plan.origin).view(shape)
        return of_query, *(_summed(part, plan, kv_heads) for part in found[1:]), None, None


def _gathered(states: Tensor, plan: _Plan, kv_heads: int) -> Tensor:
    """What is at every place, [P, R * D], of `states` [N, R * KH, D]."""
    return states.reshape(states.shape[0] * kv_heads, -1).index_select(0, plan.places)


def _sequences(places: Tensor, part: _Part, head_dim: int) -> Tensor:
    """[B * KH, L * R, D]: a view of a bucket's places."""
    rows = places[part.start : part.stop]
    return rows.view(-1, part.length * (rows.shape[1] // head_dim), head_dim)


def _summed(places: Tensor, plan: _Plan, kv_heads: int) -> Tensor:
    """[N, KH, D]: what all places of a token give it. Nobody sees padding, which gives 0."""
    if not len(plan.hollow):
        tokens = places.index_select(0, plan.origin)
    else:
        tokens = places.new_zeros((len(plan.origin), places.shape[1]))
        tokens.index_add_(0, plan.places, places)
    return tokens.view(-1, kv_heads, places.shape[1])


def _plan(packed: PackedRows, query: Tensor, key: Tensor, window: int | None) -> _Plan:
    """Made once for all layers that are alike."""
    kv_heads, repeats = key.shape[1], query.shape[1] // key.shape[1]
    kind = ("short", kv_heads, repeats, window, query.dtype)
    found = packed.made.get(kind)
    if found is None:
        found = packed.made[kind] = _made_plan(packed, kv_heads, repeats, window, query.dtype)
    plan: _Plan = found
    return plan


def _made_plan(
    packed: PackedRows, kv_heads: int, repeats: int, window: int | None, dtype: torch.dtype
) -> _Plan:
    heads = torch.arange(kv_heads)
    origin = torch.empty(len(packed.position_ids) * kv_heads, dtype=torch.int64)
    places, is_hollow, parts, start = [], [], [], 0
    for bucket in packed.buckets:
        length, num_places = bucket.max_len, bucket.num_rows * bucket.max_len
        flat = bucket.places
        if flat is None:
            flat = torch.arange(bucket.start, bucket.start + num_places)
        own = torch.arange(num_places) if bucket.filled is None else bucket.filled
        ours = (own // length * kv_heads).unsqueeze(1) + heads
        ours = (ours * length + (own % length).unsqueeze(1)).flatten()  # [B, KH, L] in a row
        origin[(flat[own].unsqueeze(1) * kv_heads + heads).flatten()] = start + ours
        at_heads = flat.view(-1, 1, length) * kv_heads + heads.unsqueeze(1)
        places.append(at_heads.flatten())
        is_hollow.append(
            torch.ones(num_places * kv_heads, dtype=torch.bool).index_fill_(0, ours, False)
        )
        stop = start + num_places * kv_heads
        mask = _mask(bucket, window, dtype).repeat_interleave(repeats, 0)
        parts.append(_Part(start, stop, length, mask))
        start = stop
    hollow = torch.cat(is_hollow).nonzero().squeeze(1)
    return _Plan(tuple(parts), torch.cat(places), origin, hollow)


def _mask(bucket: Bucket, window: int | None, dtype: torch.dtype) -> Tensor:
    """Added to the scores [L, L] of a sequence."""
    places = torch.arange(bucket.max_len)
    distance = places[:, None] - places[None, :]
    is_seen = (distance >= 0) & (distance < (bucket.max_len if window is None else window))
    return torch.zeros(is_seen.shape, dtype=dtype).masked_fill_(~is_seen, -math.inf)
