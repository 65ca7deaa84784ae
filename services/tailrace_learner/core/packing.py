"""Rows into packed batches: one flat row of tokens, positions starting anew with every row.

Rows are sorted by length, so that rows of about one length are neighbours: attention computes such
a bucket as one dense batch, without copying when the lengths are equal. Order and packing change no
result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.core.rows import Row

# A shorter row joins a bucket if at most this share of its padded length is wasted.
MAX_PADDING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring rows of about one length: tokens `start` to `stop` of the flat row."""

    start: int
    stop: int
    num_rows: int
    max_len: int
    spread: (
        Tensor | None
    )  # [num_rows * max_len] flat token (from `start`) of each place; None: no padding
    gather: Tensor | None  # [stop - start] place of each flat token


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Where the rows of a packed batch begin and end, for attention."""

    buckets: tuple[Bucket, ...]
    cu_seqlens: Tensor  # [R + 1] int32
    max_len: int


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


def micro_batches(rows: Sequence[Row], max_tokens: int) -> Iterator[list[Row]]:
    """Split rows into passes of at most `max_tokens` (a longer row goes alone), of similar lengths."""
    taken: list[Row] = []
    num_tokens = 0
    for row in sorted(rows, key=lambda row: len(row.token_ids)):
        if taken and num_tokens + len(row.token_ids) > max_tokens:
            yield taken
            taken, num_tokens = [], 0
        taken.append(row)
        num_tokens += len(row.token_ids)
    if taken:
        yield taken


def pack(rows: Sequence[Row], device: torch.device) -> PackedBatch:
    """One packed batch of all `rows`."""
    ordered = tuple(sorted(rows, key=lambda row: len(row.token_ids)))
    lengths = np.array([len(row.token_ids) for row in ordered])
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    hidden = np.concatenate([row.targets - 1 + o for row, o in zip(ordered, offsets, strict=False)])
    positions = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)

    def tensor(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(device)

    return PackedBatch(
        rows=ordered,
        input_ids=tensor(np.concatenate([row.token_ids for row in ordered])).unsqueeze(0),
        position_ids=tensor(positions).unsqueeze(0),
        packed=PackedRows(
            buckets=tuple(_buckets(lengths, offsets, device)),
            cu_seqlens=tensor(offsets).to(torch.int32),
            max_len=int(lengths[-1]),
        ),
        hidden_index=tensor(hidden),
        target_ids=tensor(np.concatenate([row.target_ids for row in ordered])),
        target_offsets=np.concatenate(([0], np.cumsum([len(row.targets) for row in ordered]))),
    )


def _buckets(
    lengths: NDArray[np.int64], offsets: NDArray[np.int64], device: torch.device
) -> Iterator[Bucket]:
    """Cut ascending lengths where a row would waste too much of the bucket's longest."""
    stop = len(lengths)
    while stop > 0:
        max_len = int(lengths[stop - 1])
        start = int(np.searchsorted(lengths[:stop], max_len * (1.0 - MAX_PADDING_SHARE)))
        yield _bucket(lengths[start:stop], int(offsets[start]), device)
        stop = start


def _bucket(lengths: NDArray[np.int64], start: int, device: torch.device) -> Bucket:
    num_rows, max_len, num_tokens = len(lengths), int(lengths[-1]), int(lengths.sum())
    spread = gather = None
    if num_rows * max_len != num_tokens:
        places = np.arange(max_len)[None, :]
        firsts = (np.cumsum(lengths) - lengths)[:, None]
        # A padded place repeats its row's last token: nothing attends to it, being after all others.
        spread = torch.from_numpy((firsts + np.minimum(places, lengths[:, None] - 1)).ravel()).to(
            device
        )
        gather = torch.from_numpy(np.flatnonzero(places < lengths[:, None])).to(device)
    return Bucket(start, start + num_tokens, num_rows, max_len, spread, gather)
