"""Places of the tokens of short sequences for batched products: queries and keys of every bucket.

A sequence holds tokens of others before its own (`layout`): those are keys only, its own are queries
too. Each key head has places of its own, so that one product has the query heads that share it as
rows.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.core.batch.layout import Bucket, PackedRows


class Heads(NamedTuple):
    """Head counts and sizes of a layer's attention, beside its batch."""

    kv_heads: int  # KH
    repeats: int  # R query heads per key head
    window: int | None  # tokens that one attends to, itself included
    dtype: torch.dtype


class Part(NamedTuple):
    """A bucket's B sequences, once per key head: Q tokens that are computed, K that they attend to."""

    num_queries: int  # Q
    num_keys: int  # K
    mask: Tensor  # [Q * R, K], or [B * KH, Q * R, K], added to the scores of R query heads per key head


class ShortPlan(NamedTuple):
    """Places of the flat tokens of each key head among those of all buckets, [B, KH, n] of each.

    A place of padding repeats a token: no query attends to it, and as a query it has no effect.
    """

    parts: tuple[Part, ...]
    query_sizes: list[int]  # places of each part's queries
    key_sizes: list[int]
    queries: Tensor  # [P] which of the N * KH tokens is at each place of queries
    keys: Tensor  # [S] the same for keys
    query_of: Tensor  # [N * KH] the place where each token is a query
    key_of: Tensor  # [N * KH] the place where each token is a key of its own sequence
    hollow: Tensor  # [p] places of queries that are padding
    seen: Tensor  # [s] places of keys that are tokens of other sequences
    seen_tokens: Tensor  # [s] which ones


def plan_of(packed: PackedRows, heads: Heads) -> ShortPlan:
    """Plan, made once for all layers that are alike."""
    found: ShortPlan | None = packed.made.get(heads)
    if found is None:
        found = packed.made[heads] = _made(packed, heads)
    return found


class _Columns(NamedTuple):
    """A bucket's B sequences of length K."""

    tokens: NDArray[np.int64]  # [B, K] the flat token of each column
    is_own: NDArray[np.bool_]  # [B, K] whether it is attended for here
    is_seen: NDArray[np.bool_]  # [B, K] whether it is another sequence's
    own: NDArray[np.int64]  # [B, Q] columns that are attended for, padded with the last
    is_query: NDArray[np.bool_]  # [B, Q] where that is no padding

    @classmethod
    def of(cls, bucket: Bucket) -> "_Columns":
        """Columns of the bucket's places."""
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
        """Mask that is added to scores, [B, Q, K], or [1, Q, K] where all sequences have the same."""
        length = self.tokens.shape[1]
        own = self.own[:1] if (self.own == self.own[0]).all() else self.own
        distance = own[:, :, None] - np.arange(length)
        is_hidden = (distance < 0) | (distance >= (length if window is None else window))
        mask = torch.zeros(is_hidden.shape, dtype=dtype)
        return mask.masked_fill_(torch.from_numpy(is_hidden), -math.inf)


def _made(packed: PackedRows, heads: Heads) -> ShortPlan:
    buckets, kv_heads = [_Columns.of(bucket) for bucket in packed.buckets], heads.kv_heads
    queries = _tokens((np.take_along_axis(each.tokens, each.own, 1) for each in buckets), kv_heads)
    keys = _tokens((each.tokens for each in buckets), kv_heads)
    is_query = _flags((each.is_query for each in buckets), kv_heads)
    is_own = _flags((each.is_own for each in buckets), kv_heads)
    seen = np.flatnonzero(_flags((each.is_seen for each in buckets), kv_heads))
    return ShortPlan(
        parts=tuple(_part(each, heads) for each in buckets),
        query_sizes=[each.own.size * kv_heads for each in buckets],
        key_sizes=[each.tokens.size * kv_heads for each in buckets],
        queries=torch.from_numpy(queries),
        keys=torch.from_numpy(keys),
        query_of=torch.from_numpy(_inverse(queries, is_query)),
        key_of=torch.from_numpy(_inverse(keys, is_own)),
        hollow=torch.from_numpy(np.flatnonzero(~is_query)),
        seen=torch.from_numpy(seen),
        seen_tokens=torch.from_numpy(keys[seen]),
    )


def _tokens(found: Iterable[NDArray[np.int64]], kv_heads: int) -> NDArray[np.int64]:
    """Tokens [B, n] of each bucket as those of each head."""
    heads = np.arange(kv_heads)[:, None]
    return np.concatenate([(tokens[:, None] * kv_heads + heads).ravel() for tokens in found])


def _flags(found: Iterable[NDArray[np.bool_]], kv_heads: int) -> NDArray[np.bool_]:
    """Flags [B, n] of each bucket, for each head."""
    return np.concatenate([np.repeat(flags, kv_heads, axis=0).ravel() for flags in found])


def _part(columns: _Columns, heads: Heads) -> Part:
    mask = columns.mask(heads.window, heads.dtype).repeat_interleave(heads.repeats, 1)
    mask = mask[0] if len(mask) == 1 else mask.repeat_interleave(heads.kv_heads, 0)
    return Part(columns.own.shape[1], columns.tokens.shape[1], mask)


def _inverse(tokens: NDArray[np.int64], is_it: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number [n] of the flagged place of each of n tokens."""
    places = np.flatnonzero(is_it)
    found = np.empty_like(places)
    found[tokens[places]] = places
    return found
