"""Weights of a sharded model as bytes, rank by rank: no rank ever holds the whole model.

All ranks know from names and shapes which bytes of a flat buffer each of them owns: `fully_shard` cuts
the first dimension, so a rank's part of a tensor is one range. The buffer is shared memory of the host
of rank 0. Ranks of that host write their ranges themselves, piece by piece; ranks of other hosts send
their pieces to rank 0, which receives them in place. Beside its own shards a rank holds one piece.
"""

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor, Shard

from tailrace.config import this_host_id
from tailrace.weights.errors import SegmentSpaceError
from tailrace.weights.segment import default_folder
from tailrace.weights.tensors import ALIGNMENT_BYTES, TensorBytes
from tailrace_learner.ports import Ranks

PIECE_BYTES = 32 << 20


class ShardSlice(NamedTuple):
    """Range of elements of one tensor, which one rank owns."""

    first: int
    num_elements: int


class _Place(NamedTuple):
    """One tensor in the buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # bytes


def rows_of(rank: int, num_ranks: int, shape: Sequence[int]) -> ShardSlice:
    """Returns a rank's part of a tensor that is cut along its first dimension, as torch cuts it."""
    rows, width = shape[0], math.prod(shape[1:])
    each = -(-rows // num_ranks)
    first = min(rank * each, rows)
    return ShardSlice(first * width, (min(first + each, rows) - first) * width)


def export_shards(
    weights: Sequence[tuple[str, Tensor]],
    dtype: torch.dtype,
    ranks: Ranks,
    *,
    host_id: str = "",
    piece_bytes: int = PIECE_BYTES,
) -> list[TensorBytes]:
    """Writes all weights into one buffer; returns its tensors, on rank 0 alone (collective).

    Floating-point tensors get `dtype`. Tensors that are not cut are written by rank 0.
    """
    places, num_bytes = _layout(weights, dtype)
    host_id = host_id or this_host_id()
    opened = _open_shared(num_bytes, ranks, host_id)
    buffer = opened[0]
    for (_, tensor), place in zip(weights, places, strict=True):
        for first, piece in _own_pieces(tensor, ranks, place.dtype, piece_bytes):
            if buffer is None:
                distributed.send(piece, dst=0)
            else:
                _target(buffer, place, first, piece.numel()).copy_(piece)
    if ranks.rank == 0:
        assert buffer is not None
        for rank in opened[1]:
            _receive(weights, places, buffer, rank, ranks.num_ranks, piece_bytes)
    ranks.collect(None)  # all have written
    if ranks.rank or buffer is None:
        return []
    data = memoryview(buffer)
    return [
        TensorBytes(
            place.name,
            str(place.dtype).removeprefix("torch."),
            place.shape,
            data[place.offset : place.offset + math.prod(place.shape) * place.dtype.itemsize],
        )
        for place in places
    ]


def _layout(weights: Sequence[tuple[str, Tensor]], dtype: torch.dtype) -> tuple[list[_Place], int]:
    places: list[_Place] = []
    end = 0
    for name, tensor in weights:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        places.append(_Place(name, kind, tuple(tensor.shape), end))
        end += -(-tensor.numel() * kind.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places, max(end, 1)


def _owned(tensor: Tensor, rank: int, num_ranks: int) -> ShardSlice:
    """Elements of the whole tensor that a rank writes."""
    if isinstance(tensor, DTensor):
        assert tensor.placements == (Shard(0),), tensor.placements
        return rows_of(rank, num_ranks, tensor.shape)
    return ShardSlice(0, tensor.numel() if rank == 0 else 0)


def _own_pieces(
    tensor: Tensor, ranks: Ranks, dtype: torch.dtype, piece_bytes: int
) -> Iterator[tuple[int, Tensor]]:
    """Copies of a rank's elements on the host, one after another, with their first element's place."""
    owned = _owned(tensor, ranks.rank, ranks.num_ranks)
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    flat, step = local.detach().reshape(-1), max(piece_bytes // dtype.itemsize, 1)
    for start in range(0, owned.num_elements, step):
        end = min(start + step, owned.num_elements)
        yield owned.first + start, flat[start:end].to("cpu", dtype)


def _target(buffer: mmap.mmap, place: _Place, first: int, count: int) -> Tensor:
    start = place.offset + first * place.dtype.itemsize
    return torch.frombuffer(buffer, dtype=place.dtype, count=count, offset=start)


def _receive(
    weights: Sequence[tuple[str, Tensor]],
    places: Sequence[_Place],
    buffer: mmap.mmap,
    rank: int,
    num_ranks: int,
    piece_bytes: int,
) -> None:
    """Receives the pieces of a rank of another host, in its order, at their places."""
    for (_, tensor), place in zip(weights, places, strict=True):
        owned = _owned(tensor, rank, num_ranks)
        step = max(piece_bytes // place.dtype.itemsize, 1)
        for start in range(0, owned.num_elements, step):
            count = min(step, owned.num_elements - start)
            distributed.recv(_target(buffer, place, owned.first + start, count), src=rank)


def _open_shared(num_bytes: int, ranks: Ranks, host_id: str) -> tuple[mmap.mmap | None, list[int]]:
    """A rank's mapping of the buffer, None on other hosts; and on rank 0 the ranks of other hosts.

    The file has no name at any time, so that nothing stays after a kill.
    """
    path, fd = "", -1
    if ranks.rank == 0:
        fd = os.open(default_folder(), os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        try:
            os.posix_fallocate(fd, 0, num_bytes)
        except OSError as error:
            os.close(fd)
            raise SegmentSpaceError(str(default_folder()), num_bytes) from error
    found: list[Any] = ranks.collect((path, host_id))
    path, host = found[0]
    if ranks.rank and host == host_id:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    buffer = None if fd < 0 else mmap.mmap(fd, num_bytes)
    ranks.collect(None)  # all have opened it
    if fd >= 0:
        os.close(fd)
    return buffer, [rank for rank, (_, other) in enumerate(found) if other != host]
