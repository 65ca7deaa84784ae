"""Keys and values of all sequences, in blocks of one preallocated cache.

Invariants: block 0 is never allocated and stays zero (it pads block tables); a block has exactly one
owner, a running row or a kept prefix; a block is zeroed at allocation, so that a masked position never
holds a value that is not finite from a broken policy version (0 * nan is nan).
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class KVShape(NamedTuple):
    """Number of heads and sizes of the keys and values of one attention layer."""

    num_heads: int
    key_dim: int
    value_dim: int


class KVCache:
    """Tensors `keys[layer]`, `values[layer]`: [num_blocks, block_tokens, heads, dim].

    Layers of one shape share one arena, so that one kernel zeroes the blocks of all of them.
    """

    def __init__(
        self,
        layers: Sequence[KVShape],
        num_blocks: int,
        block_tokens: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        counts: dict[tuple[int, int], int] = defaultdict(int)
        places = []
        for layer in layers:
            for dim in (layer.key_dim, layer.value_dim):
                places.append((layer.num_heads, dim, counts[layer.num_heads, dim]))
                counts[layer.num_heads, dim] += 1
        arenas = {
            (heads, dim): torch.zeros(
                (count, num_blocks, block_tokens, heads, dim), device=device, dtype=dtype
            )
            for (heads, dim), count in counts.items()
        }
        tensors = [arenas[heads, dim][index] for heads, dim, index in places]
        self.block_tokens = block_tokens
        self.device = device
        self.keys = tensors[0::2]
        self.values = tensors[1::2]
        self._flat = [tensor.flatten(0, 1) for tensor in tensors]
        self.arenas = list(arenas.values())

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores `keys` [T, heads, dim] and `values` at slots [T] (block * block_tokens + place)."""
        self._flat[2 * layer].index_copy_(0, slots, keys)
        self._flat[2 * layer + 1].index_copy_(0, slots, values)

    def copy(self, source: Int64Array, target: Int64Array) -> None:
        """Copies blocks `source` [n] to `target` [n] in all layers."""
        read, write = (torch.from_numpy(blocks).to(self.device) for blocks in (source, target))
        for arena in self.arenas:
            arena.index_copy_(1, write, arena.index_select(1, read))

    def zero(self, blocks: Int64Array) -> None:
        """Zeroes `blocks` [n] in all layers."""
        index = torch.from_numpy(blocks).to(self.device)
        for arena in self.arenas:
            arena.index_fill_(1, index, 0.0)


class BlockPool:
    """Stack of free blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._stack = np.arange(num_blocks - 1, 0, -1, dtype=np.int64)
        self.num_free = num_blocks - 1

    def take(self, count: int) -> Int64Array:
        """Takes blocks [count]; the caller checks that enough are free."""
        assert count <= self.num_free, f"took {count} of {self.num_free} free blocks"
        self.num_free -= count
        return self._stack[self.num_free : self.num_free + count].copy()

    def give(self, blocks: Int64Array) -> None:
        """Gives blocks [n] back."""
        end = self.num_free + len(blocks)
        assert end <= len(self._stack), "more blocks given back than there are"
        self._stack[self.num_free : end] = blocks
        self.num_free = end
