"""Attention of packed rows, as an implementation that Hugging Face models call by name.

Everything but attention runs on the flat tokens without padding. Attention is exact on every device.
The CPU uses `tree_attention`, or `short_attention` where all rows are short. Other devices use
`bucket_attention`, or `flex` where rows share prefixes.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from tailrace_learner.core.batch.layout import PackedRows
from tailrace_learner.core.cpu.short_attention import is_short, short_attention
from tailrace_learner.core.cpu.tree_attention import tree_attention
from tailrace_learner.core.model.bucket_attention import bucket_attention
from tailrace_learner.core.model.flex import flex
from tailrace_learner.core.model.forward_path import PACKED

IMPLEMENTATION = PACKED

# Tensors that come with a pass and change nothing: positions are in the queries and keys.
_KNOWN = ("position_ids", "cache_position", "position_embeddings", "cu_seq_lens_q", "cu_seq_lens_k")


class UnsupportedAttentionError(ValueError):
    """A model asks for something that `packed` attention does not compute, or gives it too little."""


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
        raise UnsupportedAttentionError(
            "attention of packed rows got no boundaries of rows: the model's layers do not pass "
            "keyword arguments on, or the model was called without packed rows"
        )
    if attention_mask is not None:
        raise UnsupportedAttentionError("attention of packed rows takes no mask of the model's own")
    for name, given in kwargs.items():
        is_part = isinstance(given, Tensor) and name not in _KNOWN
        if is_part or (name == "softcap" and given is not None):
            raise UnsupportedAttentionError(f"attention of packed rows does not compute {name}")
    if key.shape[2] != query.shape[2]:
        raise UnsupportedAttentionError("attention of packed rows has a key for each query alone")
    assert dropout == 0.0, "dropout is switched off when the model is made"
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    output = attend(query, key, value, packed_rows, scale=scaling, window=sliding_window)
    return output.unsqueeze(0), None


def attend(
    query: Tensor,  # [N, H, D]
    key: Tensor,  # [N, KH, D]
    value: Tensor,  # [N, KH, D]
    packed: PackedRows,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention output [N, H, D] by the kernel that suits the device."""
    # Under autocast norms leave queries and keys in float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    value_dim, missing = value.shape[-1], key.shape[-1] - value.shape[-1]
    if missing > 0:  # kernels take one size for all: latent attention has shorter values
        return attend(query, key, pad(value, (0, missing)), packed, scale=scale, window=window)[
            ..., :value_dim
        ]
    if query.device.type == "cpu":
        compute = short_attention if is_short(packed) else tree_attention
    else:
        compute = flex if packed.branches else bucket_attention
    return compute(query, key, value, packed, scale=scale, window=window)


def no_mask(*args: Any, **kwargs: Any) -> None:
    """Gives models that ask for a mask tensor none: packed attention needs none."""


def register() -> None:
    """Registers `IMPLEMENTATION` with Hugging Face models; repeating it does nothing."""
    AttentionInterface.register(IMPLEMENTATION, packed_attention)
    AttentionMaskInterface.register(IMPLEMENTATION, no_mask)
