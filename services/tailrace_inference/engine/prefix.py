"""Kept prefixes: cache blocks of an episode between two of its turns.

Invariants: an entry has one episode and one policy version and owns its blocks; an entry leaves when it
is reused or evicted (least recently kept first), and all leave when their version is replaced.
"""

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tailrace_inference.engine.kv_cache import Int64Array


class Prefix(NamedTuple):
    """Computed tokens of an episode, with the blocks of their keys and values."""

    token_ids: NDArray[np.int32]  # [n]
    blocks: Int64Array  # [ceil(n / block_tokens)]
    policy_version: int  # the oldest version of these keys and values


class PrefixStore:
    """Prefixes by episode, least recently kept first."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, Prefix] = OrderedDict()
        self.num_blocks = 0

    def keep(self, episode_id: str, prefix: Prefix) -> Int64Array:
        """Keeps the prefix of an episode; returns the blocks of the replaced one."""
        replaced = self.take(episode_id)
        self._entries[episode_id] = prefix
        self.num_blocks += len(prefix.blocks)
        return replaced.blocks if replaced is not None else np.empty(0, np.int64)

    def take(self, episode_id: str) -> Prefix | None:
        """Removes and returns the prefix of an episode; the caller owns its blocks then."""
        entry = self._entries.pop(episode_id, None)
        if entry is not None:
            self.num_blocks -= len(entry.blocks)
        return entry

    def evict(self) -> Int64Array:
        """Removes the oldest prefix (there must be one); returns its blocks."""
        _, entry = self._entries.popitem(last=False)
        self.num_blocks -= len(entry.blocks)
        return entry.blocks

    def clear(self) -> Int64Array:
        """Removes all prefixes; returns their blocks."""
        blocks = [entry.blocks for entry in self._entries.values()]
        self._entries.clear()
        self.num_blocks = 0
        return np.concatenate(blocks) if blocks else np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._entries)


def common_length(left: NDArray[np.int32], right: NDArray[np.int32]) -> int:
    """Number of leading tokens that `left` and `right` share."""
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    return int(differs.argmax()) if differs.any() else shorter
