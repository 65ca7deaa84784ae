"""Attention of short sequences on the CPU, by batched matrix products.

Sequences of a few dozen tokens are too little for the fused kernel's blocks. Their probabilities are
small, so they are kept, and the backward pass is five products over what the forward pass left (32 rows
of 49 tokens, 4 heads of 32: 1.4 ms against 2.2). Query heads that share a key head are rows of one
product. What a sequence shows of others has no queries in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.core.layout import Bucket, PackedRows

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
    """Attention output [N, H, D]; `window` bounds how many tokens back one sees, itself included."""
    plan = _plan(packed, query, key, window)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    output: Tensor = _ShortAttention.apply(query, key, value, plan, scale)  # type: ignore[no-untyped-call]
    return output


def is_short(packed: PackedRows) -> bool:
    """Whether all sequences are, and each sees only itself."""
    return not packed.branches and max(bucket.max_len for bucket in packed.buckets) <= MAX_LEN


class _Part(NamedTuple):
    """A bucket's B sequences, once per key head: Q tokens that are attended for, K that are seen."""

    num_queries: int  # Q
    num_keys: int  # K
    mask: Tensor  # [Q * R, K], or [B * KH, Q * R, K], added to the scores of R query heads per key head


class _Plan(NamedTuple):
    """Where the flat tokens of each key head lie among the places of all buckets.

    A place of padding repeats a token: nobody sees it, and as a query it gives and gets nothing.
    """

    parts: tuple[_Part, ...]
    query_sizes: list[int]  # places of each part's queries
    key_sizes: list[int]
    queries: Tensor  # [P] which of the N * KH tokens is at each place of queries
    keys: Tensor  # [S] the same for keys
    query_of: Tensor  # [N * KH] the place where each token is a query
    key_of: Tensor  # [N * KH] the place where each token is a key of its own sequence
    hollow: Tensor  # [p] places of queries that are padding
    seen: Tensor  # [s] places of keys that are tokens of other sequences
    seen_tokens: Tensor  # [s] which ones


class _ShortAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, plan: _Plan, scale: float
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
    """What is at every place, [P, R * D], of `states` [N, R * KH, D]."""
    return states.reshape(states.shape[0] * kv_heads, -1).index_select(0, places)


def _by_part(
    plan: _Plan, head_dim: int, queries: Sequence[Tensor], keys: Sequence[Tensor]
) -> Iterator[tuple[Any, ...]]:
    """Each part with views of its queries [B * KH, Q * R, D] and of its keys [B * KH, K, D]."""
    at_queries = [states.split_with_sizes(plan.query_sizes) for states in queries]
    at_keys = [states.split_with_sizes(plan.key_sizes) for states in keys]
    repeats = queries[0].shape[1] // head_dim
    for part, *found in zip(plan.parts, *at_queries, *at_keys, strict=True):
        lengths = [part.num_queries * repeats] * len(queries) + [part.num_keys] * len(keys)
        views = (x.view(-1, length, head_dim) for x, length in zip(found, lengths, strict=True))
        yield part, *views


def _summed(places: Tensor, plan: _Plan, kv_heads: int) -> Tensor:
    """[N, KH, D]: what all places of a token give it."""
    tokens = places.index_select(0, plan.key_of)
    if len(plan.seen):
        tokens.index_add_(0, plan.seen_tokens, places.index_select(0, plan.seen))
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


class _Columns(NamedTuple):
    """A bucket's B sequences of length K."""

    tokens: NDArray[np.int64]  # [B, K] the flat token of each column
    is_own: NDArray[np.bool_]  # [B, K] whether it is attended for here
    is_seen: NDArray[np.bool_]  # [B, K] whether it is another sequence's
    own: NDArray[np.int64]  # [B, Q] columns that are attended for, padded with the last
    is_query: NDArray[np.bool_]  # [B, Q] where that is no padding

    @classmethod
    def of(cls, bucket: Bucket) -> _Columns:
        """Of the bucket's places."""
        shape = bucket.num_rows, bucket.max_len
        is_own = np.full(shape, bucket.filled is None)
        if bucket.filled is not None:
            is_own.ravel()[bucket.filled.numpy()] = True
        tokens = np.arange(bucket.start, bucket.start + is_own.size)
        if bucket.places is not None:
            tokens = bucket.places.numpy()
        counts, first = is_own.sum(1, keepdims=True), is_own.argmax(1)[:, None]
        queries = np.arange(counts.max())
        own = first + np.minimum(queries, counts - 1)
        is_seen = np.arange(bucket.max_len) < first
        return cls(tokens.reshape(shape), is_own, is_seen, own, queries < counts)

    def mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Added to scores, [B, Q, K], or [1, Q, K] where it is the same for all sequences."""
        length = self.tokens.shape[1]
        own = self.own[:1] if (self.own == self.own[0]).all() else self.own
        distance = own[:, :, None] - np.arange(length)
        is_hidden = torch.from_numpy((distance < 0) | (distance >= (window or length)))
        return torch.zeros(is_hidden.shape, dtype=dtype).masked_fill_(is_hidden, -math.inf)


def _made_plan(
    packed: PackedRows, kv_heads: int, repeats: int, window: int | None, dtype: torch.dtype
) -> _Plan:
    buckets = [_Columns.of(bucket) for bucket in packed.buckets]
    heads = np.arange(kv_heads)[:, None]

    def tokens(found: Iterator[NDArray[np.int64]]) -> NDArray[np.int64]:
        """Of each head, [B, KH, n] in a row."""
        return np.concatenate([(each[:, None] * kv_heads + heads).ravel() for each in found])

    def places(found: Iterator[NDArray[np.bool_]]) -> NDArray[np.int64]:
        """Where the flags [B, n] are set, among those of each head."""
        flags = [np.repeat(each, kv_heads, axis=0).ravel() for each in found]
        return np.flatnonzero(np.concatenate(flags))

    queries = tokens(np.take_along_axis(each.tokens, each.own, 1) for each in buckets)
    keys = tokens(each.tokens for each in buckets)
    seen = places(each.is_seen for each in buckets)
    indices = (
        queries,
        keys,
        _inverse(queries, places(each.is_query for each in buckets)),
        _inverse(keys, places(each.is_own for each in buckets)),
        places(~each.is_query for each in buckets),
        seen,
        keys[seen],
    )
    return _Plan(
        tuple(_part(each, kv_heads, repeats, window, dtype) for each in buckets),
        [each.own.size * kv_heads for each in buckets],
        [each.tokens.size * kv_heads for each in buckets],
        *map(torch.from_numpy, indices),
    )


def _part(
    columns: _Columns, kv_heads: int, repeats: int, window: int | None, dtype: torch.dtype
) -> _Part:
    mask = columns.mask(window, dtype).repeat_interleave(repeats, 1)
    mask = mask[0] if len(mask) == 1 else mask.repeat_interleave(kv_heads, 0)
    return _Part(columns.own.shape[1], columns.tokens.shape[1], mask)


def _inverse(tokens: NDArray[np.int64], places: NDArray[np.int64]) -> NDArray[np.int64]:
    """[n] at which of `places` [n] each of n tokens is."""
    found = np.empty_like(places)
    found[tokens[places]] = places
    return found
