"""Kept prefixes: the cache blocks of an episode between two of its turns.

Invariants: an entry belongs to one episode and one policy version and owns its blocks; entries leave
by reuse, by eviction (least recently kept first), or all at once when their version is replaced.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace_inference.engine.kv_cache import Int64Array


class Prefix(NamedTuple):
    """Computed tokens of an episode and where their keys and values are."""

    token_ids: NDArray[np.int32]  # [n]
    blocks: Int64Array  # [ceil(n / block_tokens)]
    policy_version: int  # the oldest version that any of these keys and values come from


class PrefixStore:
    """Prefixes by episode, least recently kept first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Prefix] = OrderedDict()
        self.num_blocks = 0

    def keep(self, episode_id: str, prefix: Prefix) -> Int64Array:
        """Keep an episode's prefix; returns the blocks of the one it replaces."""
        replaced = self.take(episode_id)
        self._entries[episode_id] = prefix
        self.num_blocks += len(prefix.blocks)
        return replaced.blocks if replaced is not None else np.empty(0, np.int64)

    def take(self, episode_id: str) -> Prefix | None:
        """Remove and return an episode's prefix; its blocks now belong to the caller."""
        entry = self._entries.pop(episode_id, None)
        if entry is not None:
            self.num_blocks -= len(entry.blocks)
        return entry

    def evict(self) -> Int64Array:
        """Forget the prefix that was kept longest ago; returns its blocks (there must be one)."""
        _, entry = self._entries.popitem(last=False)
        self.num_blocks -= len(entry.blocks)
        return entry.blocks

    def clear(self) -> Int64Array:
        """Forget all; returns their blocks."""
        blocks = [entry.blocks for entry in self._entries.values()]
        self._entries.clear()
        self.num_blocks = 0
        return np.concatenate(blocks) if blocks else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._entries)


def common_length(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """How many leading tokens of `left` and `right` agree."""
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
