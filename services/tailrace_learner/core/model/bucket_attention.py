"""Attention of rows that share nothing, by torch's own dispatch, for devices other than the CPU.

Each bucket of rows becomes a dense [rows, length] batch under plain causal attention. Padding comes
after all tokens of its row, so it changes nothing, and its outputs are dropped.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tailrace_learner.core.batch.layout import Bucket, PackedRows

_MAX_FLASH_HEAD = 256  # dimensions


class _Spread(torch.autograd.Function):
    """Tokens at their `places`; padding gets no gradient."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, places: Tensor, filled: Tensor) -> Tensor:
        ctx.save_for_backward(filled)
        return tokens.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (filled,) = ctx.saved_tensors
        return grads[0].index_select(0, filled), None, None


class _Collect(torch.autograd.Function):
    """Tokens of the `filled` places; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, filled: Tensor) -> Tensor:
        ctx.save_for_backward(filled)
        ctx.num_places = len(places)
        return places.index_select(0, filled)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (filled,) = ctx.saved_tensors
        spread = grads[0].new_zeros((ctx.num_places, *grads[0].shape[1:]))
        return spread.index_copy_(0, filled, grads[0]), None


def bucket_attention(
    query: Tensor,  # [N, H, D]
    key: Tensor,  # [N, KH, D]
    value: Tensor,  # [N, KH, D]
    packed: PackedRows,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention output [N, H, D]."""
    assert not packed.branches
    flat = (query, key, value)
    parts = [_bucket_attention(bucket, flat, scale, window) for bucket in packed.buckets]
    parts.reverse()  # buckets come longest first, tokens shortest first
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _bucket_attention(
    bucket: Bucket, flat: tuple[Tensor, ...], scale: float | None, window: int | None
) -> Tensor:
    """Output [stop - start, H, D] of one bucket."""
    query, key, value = (_dense(bucket, states).transpose(1, 2) for states in flat)
    mask: Tensor | None = None
    if window is not None and window < bucket.max_len:
        places = torch.arange(bucket.max_len, device=query.device)
        distance = places[:, None] - places[None, :]
        mask = (distance >= 0) & (distance < window)
    group_size = query.shape[1] // key.shape[1]
    if group_size > 1 and not _takes_few_key_heads(query, mask):
        key, value = (states.repeat_interleave(group_size, dim=1) for states in (key, value))
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    places_out = output.transpose(1, 2).flatten(0, 1)  # [segments * length, H, D]
    if bucket.filled is None:
        return places_out
    collected: Tensor = _Collect.apply(places_out, bucket.filled)  # type: ignore[no-untyped-call]
    return collected


def _takes_few_key_heads(query: Tensor, mask: Tensor | None) -> bool:
    """Tells whether a fused kernel takes fewer key heads than query heads.

    Flash attention does: it needs half precision, small heads and no mask. The memory-efficient
    kernel, which takes the rest, does not: torch would use one that writes all scores.
    """
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return mask is None and is_half and query.shape[-1] <= _MAX_FLASH_HEAD


def _dense(bucket: Bucket, states: Tensor) -> Tensor:
    """Tokens [segments, length, H, D] of the bucket, padded where rows are shorter."""
    tokens = states[bucket.start : bucket.stop]
    if bucket.places is not None:
        places = bucket.places - bucket.start
        tokens = _Spread.apply(tokens, places, bucket.filled)  # type: ignore[no-untyped-call]
    return tokens.view(bucket.num_rows, bucket.max_len, *states.shape[1:])
