"""Tensors as bytes, and the flat buffer with all tensors of a version.

Each tensor begins at a multiple of 64 bytes and has its own checksum, so that an error can name a
damaged tensor.
"""

import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import xxhash

from tailrace.weights.errors import ChecksumError, ManifestError
from tailrace_protos.weights import TensorEntry, WeightManifest

ALIGNMENT_BYTES = 64
_PARALLEL_BYTES = 32 << 20  # takes some milliseconds; a pool of threads costs a tenth of one
MAX_THREADS = 4

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


class TensorBytes(NamedTuple):
    """Contiguous tensor: its torch dtype name, its shape and its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def layout(tensors: Sequence[TensorBytes]) -> tuple[list[int], int]:
    """Offset of each tensor in the flat buffer, and the size of the buffer; checks names and sizes."""
    offsets: list[int] = []
    end = 0
    names: set[str] = set()
    for tensor in tensors:
        _check_size(tensor.name, tensor.dtype, tensor.shape, tensor.data.nbytes)
        if tensor.name in names:
            raise ManifestError(tensor.name, "occurs twice")
        names.add(tensor.name)
        offsets.append(end)
        end = _aligned(end + tensor.data.nbytes)
    if not end:
        raise ManifestError("", "there are no weights to publish")
    return offsets, end


def fill(
    buffer: memoryview, tensors: Sequence[TensorBytes], offsets: Sequence[int]
) -> tuple[TensorEntry, ...]:
    """Copies the tensors to their places; returns their entries with checksums."""
    entries: list[TensorEntry] = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        data = tensor.data.cast("B")
        buffer[offset : offset + data.nbytes] = data
        checksum = xxhash.xxh3_64_intdigest(data)
        entries.append(
            TensorEntry(tensor.name, tensor.dtype, tensor.shape, offset, data.nbytes, checksum)
        )
    return tuple(entries)


def check_manifest(manifest: WeightManifest) -> None:
    """Raises `ManifestError` for a wrong offset, or a size that does not match its shape."""
    end = 0
    for entry in manifest.tensors:
        _check_size(entry.name, entry.dtype, entry.shape, entry.num_bytes)
        if entry.offset % ALIGNMENT_BYTES or entry.offset < end:
            raise ManifestError(
                entry.name, f"offset {entry.offset} is unaligned or overlaps another tensor"
            )
        end = entry.offset + entry.num_bytes
    if not manifest.tensors or end > manifest.num_bytes:
        raise ManifestError(
            "", f"{len(manifest.tensors)} tensors do not fit {manifest.num_bytes} bytes"
        )


def verify(manifest: WeightManifest, buffer: memoryview) -> None:
    """Raises `ChecksumError` for the first tensor with wrong bytes."""
    if wrong := damaged(manifest, buffer):
        raise ChecksumError(wrong[0].name, manifest.policy_version)


def damaged(manifest: WeightManifest, buffer: memoryview) -> list[TensorEntry]:
    """Tensors with wrong bytes.

    The checksum reads about as fast as one core reads memory; large versions take all of them.
    """
    slices = list(_slices(manifest, buffer))
    if manifest.num_bytes < _PARALLEL_BYTES:
        return [entry for entry, data in slices if not _is_whole(entry, data)]
    num_threads = min(MAX_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads, "weight-checksums") as pool:
        whole = pool.map(lambda part: _is_whole(*part), slices)
        return [entry for (entry, _), good in zip(slices, whole, strict=True) if not good]


def _is_whole(entry: TensorEntry, data: memoryview) -> bool:
    return xxhash.xxh3_64_intdigest(data) == entry.checksum


def views(manifest: WeightManifest, buffer: memoryview) -> Iterator[TensorBytes]:
    """Tensors of a version as views of its buffer."""
    for entry, data in _slices(manifest, buffer):
        yield TensorBytes(entry.name, entry.dtype, entry.shape, data)


def _slices(manifest: WeightManifest, buffer: memoryview) -> Iterator[tuple[TensorEntry, memoryview]]:
    for entry in manifest.tensors:
        yield entry, buffer[entry.offset : entry.offset + entry.num_bytes]


def _check_size(name: str, dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
    if dtype not in ITEM_BYTES:
        raise ManifestError(name, f"unknown dtype {dtype!r}; known dtypes: {', '.join(ITEM_BYTES)}")
    expected = math.prod(shape) * ITEM_BYTES[dtype]
    if expected != num_bytes:
        raise ManifestError(name, f"{dtype} of shape {shape} has {expected} bytes, not {num_bytes}")


def _aligned(end: int) -> int:
    return -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
