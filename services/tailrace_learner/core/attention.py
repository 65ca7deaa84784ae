"""Attention of packed rows, as an implementation that Hugging Face models call by name.

Everything but attention runs on the flat tokens without padding. Here each bucket of rows becomes a
dense [rows, length] batch under plain causal attention; padded places come after all tokens of
their row, so they change nothing, and their outputs are left behind. Exact, on every device: the CPU
has an arrangement of its own (`tree_attention`), others take Hugging Face's kernel bucket by bucket or,
where rows share prefixes, `flex`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from tailrace_learner.core.flex import flex
from tailrace_learner.core.packing import Bucket, PackedRows
from tailrace_learner.core.tree_attention import tree_attention

IMPLEMENTATION = "tailrace_packed"


class UnsupportedAttentionError(ValueError):
    """The model asks for something that `packed` attention does not compute."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"attention with {what} is not supported by learner.model_args.attn_implementation "
            "'packed': use 'eager'"
        )
        self.what = what


class _Rearrange(torch.autograd.Function):
    """Rows of `source` by `index`; `inverse` leads back. What it skips gets no gradient."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grads[0].index_select(0, inverse), None, None


class _Collect(torch.autograd.Function):
    """Tokens of padded places by `gather`; the gradient of padding is zero."""

    @staticmethod
    def forward(ctx: Any, places: Tensor, gather: Tensor) -> Tensor:
        ctx.save_for_backward(gather)
        ctx.num_places = len(places)
        return places.index_select(0, gather)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gather,) = ctx.saved_tensors
        spread = grads[0].new_zeros((ctx.num_places, *grads[0].shape[1:]))
        return spread.index_copy_(0, gather, grads[0]), None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, H, N, D]
    key: Tensor,  # [1, KH, N, D]
    value: Tensor,  # [1, KH, N, D]
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    packed_rows: PackedRows | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention output [1, N, H, D] of packed rows."""
    if packed_rows is None:
        raise UnsupportedAttentionError("layers that do not pass keyword arguments on")
    for what in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(what) is not None:
            raise UnsupportedAttentionError(what)
    assert dropout == 0.0, "dropout is switched off when the model is made"
    flat = [states[0].transpose(0, 1) for states in (query, key, value)]  # [N, H, D]
    if query.device.type == "cpu":
        same = [states.to(value.dtype) for states in flat]  # autocast: norms leave q and k in float32
        output = tree_attention(*same, packed_rows, scale=scaling, window=sliding_window)
        return output.unsqueeze(0), None
    if packed_rows.branches:
        return flex(query, key, value, packed_rows, scale=scaling, window=sliding_window), None
    parts = [_bucket_attention(bucket, flat, scaling, sliding_window) for bucket in packed_rows.buckets]
    parts.reverse()  # buckets come longest first, tokens shortest first
    output = parts[0] if len(parts) == 1 else torch.cat(parts)
    return output.unsqueeze(0), None


def _bucket_attention(
    bucket: Bucket, flat: list[Tensor], scaling: float | None, sliding_window: int | None
) -> Tensor:
    """Output [stop - start, H, D] of one bucket."""
    query, key, value = (_dense(bucket, states).transpose(1, 2) for states in flat)
    mask = None
    if sliding_window is not None and sliding_window < bucket.max_len:
        places = torch.arange(bucket.max_len, device=query.device)
        distance = places[:, None] - places[None, :]
        mask = (distance >= 0) & (distance < sliding_window)
    output = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=key.shape[1] != query.shape[1],
    )
    places_out = output.transpose(1, 2).flatten(0, 1)  # [rows * length, H, D]
    if bucket.filled is None:
        return places_out
    collected: Tensor = _Collect.apply(places_out, bucket.filled)  # type: ignore[no-untyped-call]
    return collected


def _dense(bucket: Bucket, states: Tensor) -> Tensor:
    """The bucket's tokens [rows, length, H, D], padded where rows are shorter."""
    tokens = states[bucket.start : bucket.stop]
    if bucket.places is not None:
        places = bucket.places - bucket.start
        tokens = _Rearrange.apply(tokens, places, bucket.filled)  # type: ignore[no-untyped-call]
    return tokens.view(bucket.num_segments, bucket.max_len, *states.shape[1:])


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Packed attention needs no mask tensor; models that ask for one get none."""


def register() -> None:
    """Make `IMPLEMENTATION` known to Hugging Face models; repeating it does nothing."""
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, no_mask)
