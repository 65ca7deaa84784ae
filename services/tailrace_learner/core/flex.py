"""Attention of packed trees as one compiled kernel with a block mask, for CUDA.

In preorder the flat tokens that see token k are k to reach[k] - 1: its own segment's later ones and all
that continues it. That is the whole mask, for trees and for rows by themselves. FlexAttention skips the
blocks in which nothing is seen. Its backward exists on CUDA only. Tests on the CPU compare the mask and
the uncompiled forward with the other paths; the compiled kernel has not been run on any device yet.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from tailrace_learner.core.layout import PackedRows

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visible(packed: PackedRows, window: int | None) -> MaskMod:
    """Whether flat token `query` sees flat token `key`, as FlexAttention asks."""
    reach, positions = packed.reach, packed.position_ids

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        is_seen = (key <= query) & (query < reach[key])
        return is_seen if window is None else is_seen & (positions[query] - positions[key] < window)

    return sees


def flex(
    query: Tensor,  # [N, H, D]
    key: Tensor,  # [N, KH, D]
    value: Tensor,  # [N, KH, D]
    packed: PackedRows,
    *,
    scale: float | None,
    window: int | None,
) -> Tensor:
    """Attention output [N, H, D]."""
    heads_first = [states.transpose(0, 1).unsqueeze(0) for states in (query, key, value)]
    kernel = _compiled() if query.is_cuda else flex_attention
    mask = _block_mask(packed, window, query.device)
    enable_gqa = key.shape[1] != query.shape[1]
    output: Tensor = kernel(*heads_first, block_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return output[0].transpose(0, 1)


def _block_mask(packed: PackedRows, window: int | None, device: torch.device) -> BlockMask:
    """Computed once for all layers of a batch."""
    size = len(packed.reach)
    found = packed.made.get(("flex", window))
    if not isinstance(found, BlockMask):
        found = create_block_mask(visible(packed, window), None, None, size, size, device=device)
        packed.made["flex", window] = found
    return found


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
