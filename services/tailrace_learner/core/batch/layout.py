"""Layout of a packed batch for attention: which flat tokens attend to which.

Segments (`prefix_tree`) of similar length are one dense causal batch (`Bucket`). The attention of a
segment to those before it in its rows is separate (`Branch`). In trees of short rows each segment is
laid out after all that it attends to instead: a few tokens occur more than once, and one kernel
replaces many.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.core.batch import prefix_tree
from tailrace_learner.core.batch.prefix_tree import Forest

# A shorter sequence joins a bucket if at most this share of its padded length is wasted, or so little.
MAX_PADDING_SHARE = 0.25
MAX_PADDING = 8
# In trees of rows up to this length segments repeat the tokens they attend to, on the CPU.
MAX_WHOLE_ROW = 64

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Sequences of similar length as a dense batch; without `places` they are `start` to `stop`.

    `places` [num_rows * max_len] is the flat token of each place; padding repeats a sequence's last.
    `tokens` [n], each once, are those whose attention is computed here, and `filled` [n] their places
    (None: all places in order). With `repeats` other places hold tokens of another sequence, which it
    attends to.
    """

    num_rows: int
    max_len: int
    start: int
    stop: int
    places: Tensor | None
    tokens: Tensor | None
    filled: Tensor | None
    repeats: bool


@dataclass(frozen=True, slots=True)
class Branch:
    """A segment that others continue: all of `stop` to `end` attend to tokens `start` to `stop`."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Attention pattern of a packed batch."""

    buckets: tuple[Bucket, ...]  # those that repeat tokens of others come last
    branches: tuple[Branch, ...]  # none: no bucket's sequence attends to more than itself
    position_ids: Tensor  # [N]
    reach: Tensor  # [N] flat token k is seen by k to reach[k] - 1
    cu_seqlens: Tensor  # [segments + 1] int32
    max_len: int
    made: dict[Any, Any] = field(default_factory=dict)  # by attention, once for all layers


class _Sequence(NamedTuple):
    """Flat tokens that attend to themselves and those before; the last `num_own` are computed."""

    flat: Places
    num_own: int


def lone_tokens(lengths: Sequence[int], device: torch.device) -> PackedRows:
    """Layout of rows of these lengths that share nothing."""
    forest = prefix_tree.lone_rows([np.zeros(length, np.int64) for length in lengths])
    positions = np.concatenate([np.arange(length) for length in lengths])
    return laid_out(forest, forest.starts, torch.from_numpy(positions).to(device), device)


def laid_out(forest: Forest, starts: Places, position_ids: Tensor, device: torch.device) -> PackedRows:
    """Layout of a forest whose segments begin at flat tokens `starts`."""
    ends = forest.ends
    is_whole = _short_trees(forest, ends) if device.type == "cpu" else np.zeros(len(ends), np.bool_)
    lengths = np.diff(starts)
    branches = tuple(
        Branch(int(starts[index]), int(starts[index + 1]), int(starts[ends[index]]))
        for index in np.flatnonzero((ends > np.arange(1, len(ends) + 1)) & ~is_whole)
    )
    alone: list[_Sequence] = []
    repeating: list[_Sequence] = []
    for sequence in _sequences(forest, starts, is_whole):
        (alone if sequence.num_own == len(sequence.flat) else repeating).append(sequence)
    return PackedRows(
        buckets=(*_buckets(alone, device), *_buckets(repeating, device)),
        branches=branches,
        position_ids=position_ids,
        reach=torch.from_numpy(np.repeat(starts[ends], lengths)).to(device),
        cu_seqlens=torch.from_numpy(starts).to(device, torch.int32),
        max_len=int(lengths.max()),
    )


def _short_trees(forest: Forest, ends: Places) -> NDArray[np.bool_]:
    """Flags [segments] of those in trees whose rows are all short."""
    found = np.zeros(len(ends), np.bool_)
    stops = np.array([segment.stop for segment in forest.segments])
    root = 0
    while root < len(ends):
        end = int(ends[root])
        found[root:end] = stops[root:end].max() <= MAX_WHOLE_ROW
        root = end
    return found


def _sequences(forest: Forest, starts: Places, is_whole: NDArray[np.bool_]) -> Iterator[_Sequence]:
    """Segments; in whole trees with all tokens that they attend to before them."""
    for index in range(len(forest.segments)):
        flat = np.arange(starts[index], starts[index + 1])
        before = _before(forest, starts, index) if is_whole[index] else []
        yield _Sequence(np.concatenate((*before, flat)), len(flat))


def _before(forest: Forest, starts: Places, segment: int) -> list[Places]:
    """Flat tokens of the segments before `segment` in its rows."""
    found = []
    while (segment := forest.segments[segment].parent) >= 0:
        found.append(np.arange(starts[segment], starts[segment + 1]))
    return found[::-1]


def _buckets(sequences: Sequence[_Sequence], device: torch.device) -> Iterator[Bucket]:
    """Cuts ascending lengths where a sequence would waste too much of the bucket's longest."""
    ascending = sorted(sequences, key=lambda sequence: len(sequence.flat))
    lengths = np.array([len(sequence.flat) for sequence in ascending])
    stop = len(lengths)
    while stop > 0:
        wasted = max(MAX_PADDING, lengths[stop - 1] * MAX_PADDING_SHARE)
        start = int(np.searchsorted(lengths[:stop], lengths[stop - 1] - wasted))
        yield _bucket(ascending[start:stop], device)
        stop = start


def _bucket(sequences: Sequence[_Sequence], device: torch.device) -> Bucket:
    max_len = len(sequences[-1].flat)
    columns = np.arange(max_len)
    flat = np.empty((len(sequences), max_len), np.int64)
    is_own = np.empty(flat.shape, np.bool_)
    for row, (tokens, num_own) in enumerate(sequences):
        size = len(tokens)
        flat[row, :size], flat[row, size:] = tokens, tokens[-1]
        is_own[row] = (columns >= size - num_own) & (columns < size)
    begin, num_own = int(flat[0, 0]), int(is_own.sum())
    repeats = any(num_own < len(tokens) for tokens, num_own in sequences)
    if not repeats and (flat.ravel() == np.arange(begin, begin + flat.size)).all():
        return Bucket(len(flat), max_len, begin, begin + num_own, None, None, None, repeats)
    return Bucket(
        len(flat),
        max_len,
        begin,
        begin + num_own,
        places=torch.from_numpy(flat.ravel()).to(device),
        tokens=torch.from_numpy(flat[is_own]).to(device),
        filled=None if is_own.all() else torch.from_numpy(np.flatnonzero(is_own)).to(device),
        repeats=repeats,
    )
