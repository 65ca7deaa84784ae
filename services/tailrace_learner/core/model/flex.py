"""Attention of packed trees as one compiled kernel with a block mask, for CUDA.

In preorder the flat tokens that attend to token k are k to reach[k] - 1: the later ones of its own
segment and all that continues it. That is the whole mask, for trees and for rows by themselves.
FlexAttention skips blocks without such a pair. The bounds of a block show which these are, so no [N,
N] mask is ever made. Its backward exists on CUDA only. Tests on the CPU compare the mask, the blocks
and the uncompiled forward with the other paths; `tests/gpu` the compiled kernel and its gradients.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from tailrace_learner.core.batch.layout import PackedRows

BLOCK = 128  # tokens
# torch's kernel for less than a block of queries knows no shared key heads at most lengths.
_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def visible(packed: PackedRows, window: int | None) -> MaskMod:
    """Mask function for FlexAttention: whether flat token `query` attends to flat token `key`."""
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
    mask = _block_mask(packed, window)
    enable_gqa = key.shape[1] != query.shape[1]
    output: Tensor = kernel(
        *heads_first, block_mask=mask, scale=scale, enable_gqa=enable_gqa, kernel_options=_OPTIONS
    )
    return output[0].transpose(0, 1)


def _block_mask(packed: PackedRows, window: int | None) -> BlockMask:
    """Block mask, computed once for all layers of a batch."""
    found = packed.made.get(("flex", window))
    if not isinstance(found, BlockMask):
        found = packed.made["flex", window] = block_mask(packed, window)
    return found


def block_mask(packed: PackedRows, window: int | None) -> BlockMask:
    """Blocks of keys that each block of queries attends to: in part, as a whole, or not at all.

    A block that is listed as attended in part may hold no such pair: the kernel asks for each.
    """
    reach, positions = _bounds(packed.reach), _bounds(packed.position_ids)
    first = torch.arange(len(reach.least), device=packed.reach.device) * BLOCK
    last = first + BLOCK - 1
    is_seen = (first[None, :] <= last[:, None]) & (first[:, None] < reach.most[None, :])
    is_whole = (last[None, :] <= first[:, None]) & (last[:, None] < reach.least[None, :])
    if window is not None:
        is_seen &= positions.least[:, None] - positions.most[None, :] < window
        is_whole &= positions.most[:, None] - positions.least[None, :] < window
    size = len(packed.reach)
    return BlockMask.from_kv_blocks(
        *_listed(is_seen & ~is_whole),
        *_listed(is_whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=visible(packed, window),
        seq_lengths=(size, size),
    )


class _Bounds(NamedTuple):
    """Least and greatest value in each block [blocks]."""

    least: Tensor
    most: Tensor


def _bounds(values: Tensor) -> _Bounds:
    """Bounds of values [N]; missing values of the last block are like its last."""
    blocks = torch.cat((values, values[-1:].expand(-len(values) % BLOCK))).view(-1, BLOCK)
    return _Bounds(blocks.amin(-1), blocks.amax(-1))


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of set flags per row [1, 1, Q] of flags [Q, K], and their columns first [1, 1, Q, K]."""
    columns = blocks.int().argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[None, None], columns.int()[None, None]


@cache
def _compiled() -> Any:
    return torch.compile(flex_attention, dynamic=True)
