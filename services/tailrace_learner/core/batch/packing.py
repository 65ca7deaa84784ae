"""Packing of rows into one flat row of tokens; positions count from the beginning of each row.

Without sharing every row is a segment. With sharing a segment is what rows have in common, or what a
row has alone (`prefix_tree`), and a flat token may belong to many rows. `layout` says which tokens
attend to which. Order and packing change no result.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.core.batch import prefix_tree
from tailrace_learner.core.batch.layout import PackedRows, laid_out
from tailrace_learner.core.batch.prefix_tree import Forest
from tailrace_learner.core.batch.rows import TrainingRow


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """A micro-batch on its device. `rows` are in packed order."""

    rows: tuple[TrainingRow, ...]
    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N]
    packed: PackedRows
    hidden_index: Tensor  # [M] flat token whose hidden state predicts the target
    target_ids: Tensor  # [M]
    target_offsets: NDArray[np.int64]  # [R + 1] each row's targets


def micro_batches(
    rows: Sequence[TrainingRow],
    max_tokens: int,
    *,
    share_prefixes: bool = False,
    max_row_tokens: int | None = None,
) -> Iterator[list[TrainingRow]]:
    """Splits rows into passes of at most `max_tokens` (a longer row goes alone), of similar lengths.

    With `share_prefixes` rows of a tree stay together as far as the bound allows, and tokens that
    they have in common count once. Rows longer than `max_row_tokens` go alone.
    """
    if max_row_tokens is not None:
        yield from ([row] for row in rows if len(row.token_ids) > max_row_tokens)
        rows = [row for row in rows if len(row.token_ids) <= max_row_tokens]
    taken: list[TrainingRow] = []
    num_tokens = 0
    for row, cost, needed in _costs(rows, share_prefixes=share_prefixes):
        if taken and num_tokens + needed > max_tokens:
            yield taken
            taken, num_tokens = [], 0
        # The first row of a pass shares with none before it.
        num_tokens += cost if taken else len(row.token_ids)
        taken.append(row)
    if taken:
        yield taken


def computed_tokens(rows: Sequence[TrainingRow], *, share_prefixes: bool = False) -> int:
    """Approximate number of tokens that passes of all `rows` compute; shared ones count once."""
    return sum(cost for _, cost, _ in _costs(rows, share_prefixes=share_prefixes))


def _costs(
    rows: Sequence[TrainingRow], *, share_prefixes: bool
) -> Iterator[tuple[TrainingRow, int, int]]:
    """Rows in the order of passes, the most tokens that each adds, and those that must fit with it.

    A tree is begun where all of it fits.
    """
    for tree, costs in _trees(rows) if share_prefixes else _alone(rows):
        yield from zip(tree, costs, (sum(costs), *costs[1:]), strict=True)


def _alone(rows: Sequence[TrainingRow]) -> Iterator[tuple[list[TrainingRow], list[int]]]:
    for row in sorted(rows, key=lambda row: len(row.token_ids)):
        yield [row], [len(row.token_ids)]


def _trees(rows: Sequence[TrainingRow]) -> list[tuple[list[TrainingRow], list[int]]]:
    """Rows that share prefixes, with the most tokens that each adds; shortest trees first."""
    order, common = prefix_tree.alike([row.token_ids for row in rows])
    found = []
    for begin, end in prefix_tree.runs(common, 0, len(order), 0):
        tree = [rows[index] for index in order[begin:end]]
        saved = [0, *(prefix_tree.least_shared(size) for size in common[begin + 1 : end])]
        costs = [len(row.token_ids) - size for row, size in zip(tree, saved, strict=True)]
        found.append((tree, costs))
    found.sort(key=lambda pair: max(len(row.token_ids) for row in pair[0]))
    return found


def pack(
    rows: Sequence[TrainingRow], device: torch.device, *, share_prefixes: bool = False
) -> PackedBatch:
    """Packs all `rows` into one batch."""
    ordered = tuple(sorted(rows, key=lambda row: len(row.token_ids)))
    token_ids = [row.token_ids for row in ordered]
    forest = prefix_tree.share(token_ids) if share_prefixes else prefix_tree.lone_rows(token_ids)
    starts = forest.starts
    parts = [token_ids[source][start:stop] for source, start, stop, _ in forest.segments]
    positions = np.concatenate([np.arange(start, stop) for _, start, stop, _ in forest.segments])
    hidden = [_flat(forest, starts, index, row) for index, row in enumerate(ordered)]

    def tensor(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    position_ids = tensor(positions)
    return PackedBatch(
        rows=ordered,
        input_ids=tensor(np.concatenate(parts, dtype=np.int64)).unsqueeze(0),
        position_ids=position_ids.unsqueeze(0),
        packed=laid_out(forest, starts, position_ids, device),
        hidden_index=tensor(np.concatenate(hidden)),
        target_ids=tensor(np.concatenate([row.target_ids for row in ordered], dtype=np.int64)),
        target_offsets=np.concatenate(([0], np.cumsum([len(row.targets) for row in ordered]))),
    )


def _flat(forest: Forest, starts: NDArray[np.int64], index: int, row: TrainingRow) -> NDArray[np.int64]:
    """Flat tokens [m] before the row's targets."""
    path = forest.path(index)
    borders = np.array([forest.segments[segment].start for segment in path])
    shifts: NDArray[np.int64] = starts[path] - borders  # from places in the row to flat tokens
    which = np.searchsorted(borders, row.targets - 1, side="right") - 1
    flat: NDArray[np.int64] = row.targets - 1 + shifts[which]
    return flat
