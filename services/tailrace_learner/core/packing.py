"""Rows into packed batches: one flat row of tokens, positions counted from the beginning of each row.

Without sharing every row is a segment. With sharing a segment is what rows have in common, or what
a row has alone (`prefix_tree`), and a flat token may belong to many rows. Attention computes segments
of about one length as one dense batch, without copying where they are neighbours of equal length, and
what a segment sees of those before it in its rows apart (`Branch`). Order and packing change no result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.core import prefix_tree
from tailrace_learner.core.prefix_tree import Forest
from tailrace_learner.core.rows import Row

# A shorter segment joins a bucket if at most this share of its padded length is wasted.
MAX_PADDING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Bucket:
    """Segments of about one length as a dense batch; without `places` they are `start` to `stop`."""

    num_segments: int
    max_len: int
    start: int
    stop: int
    places: Tensor | None  # [num_segments * max_len] flat token of each place; padding repeats the last
    tokens: Tensor | None  # [n] flat tokens, each once; given with `places`
    filled: Tensor | None  # [n] place of each of `tokens`; None: there is no padding


@dataclass(frozen=True, slots=True)
class Branch:
    """A segment that others continue: tokens `start` to `stop`, seen by all of `stop` to `end`."""

    start: int
    stop: int
    end: int


@dataclass(frozen=True, slots=True)
class PackedRows:
    """What sees what in a packed batch, for attention."""

    buckets: tuple[Bucket, ...]
    branches: tuple[Branch, ...]  # none: every segment is a row
    position_ids: Tensor  # [N]
    reach: Tensor  # [N] flat token k is seen by k to reach[k] - 1
    cu_seqlens: Tensor  # [segments + 1] int32
    max_len: int
    masks: dict[int | None, Any] = field(default_factory=dict)  # made once for all layers, by window


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A micro-batch on its device. `rows` are in packed order."""

    rows: tuple[Row, ...]
    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]
    packed: PackedRows
    hidden_index: Tensor  # [M] flat token whose hidden state predicts the target
    target_ids: Tensor  # [M]
    target_offsets: NDArray[np.int64]  # [R + 1] each row's targets


def micro_batches(
    rows: Sequence[Row], max_tokens: int, *, share_prefixes: bool = False
) -> Iterator[list[Row]]:
    """Split rows into passes of at most `max_tokens` (a longer row goes alone), of similar lengths.

    With `share_prefixes` rows of a tree stay together as far as the bound allows, and tokens that they
    have in common count once.
    """
    taken: list[Row] = []
    num_tokens = 0
    for tree, costs in _trees(rows) if share_prefixes else _alone(rows):
        fits = num_tokens + sum(costs) <= max_tokens
        if taken and not fits:
            yield taken
            taken, num_tokens = [], 0
        for row, cost in zip(tree, costs, strict=True):
            if taken and num_tokens + cost > max_tokens:
                yield taken
                taken, num_tokens = [], 0
            # The first row of a pass shares with none before it.
            num_tokens += cost if taken else len(row.token_ids)
            taken.append(row)
    if taken:
        yield taken


def _alone(rows: Sequence[Row]) -> Iterator[tuple[list[Row], list[int]]]:
    for row in sorted(rows, key=lambda row: len(row.token_ids)):
        yield [row], [len(row.token_ids)]


def _trees(rows: Sequence[Row]) -> list[tuple[list[Row], list[int]]]:
    """Rows that share prefixes, with at most how many tokens each adds; shortest trees first."""
    order, common = prefix_tree.alike([row.token_ids for row in rows])
    found = []
    for begin, end in prefix_tree.runs(common, 0, len(order), 0):
        tree = [rows[index] for index in order[begin:end]]
        saved = [0, *(prefix_tree.least_shared(size) for size in common[begin + 1 : end])]
        costs = [len(row.token_ids) - size for row, size in zip(tree, saved, strict=True)]
        found.append((tree, costs))
    found.sort(key=lambda pair: max(len(row.token_ids) for row in pair[0]))
    return found


def pack(rows: Sequence[Row], device: torch.device, *, share_prefixes: bool = False) -> PackedBatch:
    """One packed batch of all `rows`."""
    ordered = tuple(sorted(rows, key=lambda row: len(row.token_ids)))
    token_ids = [row.token_ids for row in ordered]
    forest = prefix_tree.share(token_ids) if share_prefixes else prefix_tree.lone_rows(token_ids)
    if share_prefixes and len(forest.segments) == len(rows):  # nothing is shared
        forest = prefix_tree.lone_rows(token_ids)
    starts = forest.starts
    parts = [token_ids[source][start:stop] for source, start, stop, _ in forest.segments]
    positions = np.concatenate([np.arange(start, stop) for _, start, stop, _ in forest.segments])
    hidden = [_flat(forest, starts, index, row) for index, row in enumerate(ordered)]

    def tensor(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    position_ids = tensor(positions)
    return PackedBatch(
        rows=ordered,
        input_ids=tensor(np.concatenate(parts)).unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        packed=_packed_rows(forest, starts, position_ids, device),
        hidden_index=tensor(np.concatenate(hidden)),
        target_ids=tensor(np.concatenate([row.target_ids for row in ordered])),
        target_offsets=np.concatenate(([0], np.cumsum([len(row.targets) for row in ordered]))),
    )


def lone_tokens(lengths: Sequence[int], device: torch.device) -> PackedRows:
    """What rows of these lengths see that share nothing."""
    forest = prefix_tree.lone_rows([np.zeros(length, np.int64) for length in lengths])
    positions = np.concatenate([np.arange(length) for length in lengths])
    return _packed_rows(forest, forest.starts, torch.from_numpy(positions).to(device), device)


def _flat(forest: Forest, starts: NDArray[np.int64], index: int, row: Row) -> NDArray[np.int64]:
    """[m] flat tokens before the row's targets."""
    path = forest.path(index)
    borders = np.array([forest.segments[segment].start for segment in path])
    shifts: NDArray[np.int64] = starts[path] - borders  # from places in the row to flat tokens
    which = np.searchsorted(borders, row.targets - 1, side="right") - 1
    flat: NDArray[np.int64] = row.targets - 1 + shifts[which]
    return flat


def _packed_rows(
    forest: Forest, starts: NDArray[np.int64], position_ids: Tensor, device: torch.device
) -> PackedRows:
    lengths = np.diff(starts)
    is_sorted = bool((lengths[1:] >= lengths[:-1]).all())
    ends = starts[forest.ends]
    branches = tuple(
        Branch(int(start), int(stop), int(end))
        for start, stop, end in zip(starts[:-1], starts[1:], ends, strict=True)
        if end > stop
    )
    return PackedRows(
        buckets=tuple(_buckets(lengths, starts[:-1], is_sorted, device)),
        branches=branches,
        position_ids=position_ids,
        reach=torch.from_numpy(np.repeat(ends, lengths)).to(device),
        cu_seqlens=torch.from_numpy(starts).to(device, torch.int32),
        max_len=int(lengths.max()),
    )


def _buckets(
    lengths: NDArray[np.int64], starts: NDArray[np.int64], is_sorted: bool, device: torch.device
) -> Iterator[Bucket]:
    """Cut ascending lengths where a segment would waste too much of the bucket's longest."""
    order = np.argsort(lengths, kind="stable")
    lengths, starts = lengths[order], starts[order]
    stop = len(lengths)
    while stop > 0:
        max_len = int(lengths[stop - 1])
        start = int(np.searchsorted(lengths[:stop], max_len * (1.0 - MAX_PADDING_SHARE)))
        yield _bucket(lengths[start:stop], starts[start:stop], is_sorted, device)
        stop = start


def _bucket(
    lengths: NDArray[np.int64], starts: NDArray[np.int64], is_sorted: bool, device: torch.device
) -> Bucket:
    max_len, num_tokens = int(lengths[-1]), int(lengths.sum())
    begin = int(starts[0])
    places = tokens = filled = None
    is_padded = len(lengths) * max_len != num_tokens
    if is_padded or not is_sorted:
        columns = np.arange(max_len)[None, :]
        # A padded place repeats its row's last token: nothing attends to it, being after all others.
        flat = starts[:, None] + np.minimum(columns, lengths[:, None] - 1)
        is_filled = (columns < lengths[:, None]).ravel()
        places = torch.from_numpy(flat.ravel()).to(device)
        tokens = torch.from_numpy(flat.ravel()[is_filled]).to(device)
        filled = torch.from_numpy(np.flatnonzero(is_filled)).to(device) if is_padded else None
    return Bucket(len(lengths), max_len, begin, begin + num_tokens, places, tokens, filled)
