"""Differences between two versions with the same tensors.

An optimizer step at the learning rates of reinforcement learning changes about one bfloat16 number in a
hundred (PULSE, arXiv 2602.03839), mostly to its neighbour. A delta holds, for each tensor, the gaps
between the elements that changed and the differences of their bits as integers (the sign in the lowest
bit), in planes of bytes, compressed by zstd. Applied to the bytes of `from_version` it gives those of
`policy_version` bit for bit; the checksums of the version's manifest are those of the result, so that
they check the delta too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from tailrace.weights.buffers import copied
from tailrace.weights.errors import ChecksumError
from tailrace.weights.tensors import ITEM_BYTES, verify
from tailrace_protos.weights import DeltaEntry, TensorEntry, WeightDelta, WeightManifest

_DENSE_SHARE = 0.25  # of changed elements; above it their places cost more than they save
_ALL = -1
_LEVEL = 1


def same_layout(before: WeightManifest, after: WeightManifest) -> bool:
    """Says whether both versions have the same tensors at the same places."""
    return before.num_bytes == after.num_bytes and [
        (entry.name, entry.dtype, entry.shape, entry.offset) for entry in before.tensors
    ] == [(entry.name, entry.dtype, entry.shape, entry.offset) for entry in after.tensors]


def encode_delta(
    before: WeightManifest, after: WeightManifest, old: memoryview, new: memoryview
) -> tuple[WeightDelta, bytes]:
    """Returns the delta between two versions with `same_layout`, and its payload."""
    entries: list[DeltaEntry] = []
    payloads: list[bytes] = []
    for number, (was, entry) in enumerate(zip(before.tensors, after.tensors, strict=True)):
        if was.checksum == entry.checksum:
            continue
        num_changed, payload = _encode(_elements(entry, old), _elements(entry, new))
        entries.append(DeltaEntry(number, num_changed, len(payload)))
        payloads.append(payload)
    delta = WeightDelta(
        before.policy_version, after.policy_version, tuple(entries), sum(map(len, payloads))
    )
    return delta, b"".join(payloads)


def apply_delta(
    delta: WeightDelta, manifest: WeightManifest, payload: memoryview, buffer: memoryview
) -> None:
    """Turns `buffer` from `delta.from_version` into `delta.policy_version`, in place.

    `manifest`: that of any version with the same layout. A payload that does not fit raises
    `ChecksumError`; one that fits and is wrong is found by `verify` against the version's manifest.
    """
    for entry, data in _payloads(delta, manifest, payload):
        tensor = manifest.tensors[entry.tensor]
        try:
            _apply(entry, data, _elements(tensor, buffer))
        except (zstandard.ZstdError, IndexError, ValueError) as error:
            raise ChecksumError(tensor.name, delta.policy_version) from error


def apply_deltas(
    manifest: WeightManifest, chain: list[tuple[WeightDelta, memoryview]], baseline: memoryview
) -> memoryview:
    """Returns the verified bytes of `manifest` from those of the first delta's `from_version`.

    It reads and writes whole versions: call it in a thread.
    """
    buffer = copied(baseline)
    for delta, payload in chain:
        apply_delta(delta, manifest, payload, buffer)
    verify(manifest, buffer)
    return buffer


def _payloads(
    delta: WeightDelta, manifest: WeightManifest, payload: memoryview
) -> Iterator[tuple[DeltaEntry, memoryview]]:
    start = 0
    for entry in delta.entries:
        end = start + entry.num_bytes
        if not 0 <= entry.tensor < len(manifest.tensors) or end > payload.nbytes:
            raise ChecksumError(f"number {entry.tensor}", delta.policy_version)
        yield entry, payload[start:end]
        start = end


def _elements(entry: TensorEntry, buffer: memoryview) -> NDArray[Any]:
    """Elements of a tensor as unsigned integers, a view."""
    data = buffer[entry.offset : entry.offset + entry.num_bytes]
    return np.frombuffer(data, dtype=f"u{ITEM_BYTES[entry.dtype]}")


def _encode(old: NDArray[Any], new: NDArray[Any]) -> tuple[int, bytes]:
    changed = np.flatnonzero(old != new)
    if len(changed) > _DENSE_SHARE * len(old) or len(old) > np.iinfo(np.uint32).max:
        return _ALL, _compressed(_planes(_difference(old, new)))
    gaps = (np.diff(changed, prepend=-1) - 1).astype(np.uint32)
    return len(changed), _compressed(_planes(gaps) + _planes(_difference(old[changed], new[changed])))


def _apply(entry: DeltaEntry, payload: memoryview, elements: NDArray[Any]) -> None:
    width = elements.itemsize
    if entry.num_changed == _ALL:
        elements += _signed(_joined(_decompressed(payload, elements.nbytes), width))
        return
    size = entry.num_changed * np.dtype(np.uint32).itemsize
    data = _decompressed(payload, size + entry.num_changed * width)
    places = np.cumsum(_joined(data[:size], 4), dtype=np.int64) + np.arange(entry.num_changed)
    elements[places] += _signed(_joined(data[size:], width))


def _difference(old: NDArray[Any], new: NDArray[Any]) -> NDArray[Any]:
    """Returns new - old modulo the width: 0, -1, 1, -2, ... as 0, 1, 2, 3, ..."""
    change = new - old
    signed: NDArray[Any] = (change << 1) ^ -(change >> (8 * change.itemsize - 1))
    return signed


def _signed(values: NDArray[Any]) -> NDArray[Any]:
    """Inverts `_difference`, modulo the width."""
    return (values >> 1) ^ -(values & 1)


def _planes(values: NDArray[Any]) -> bytes:
    """Bytes of little-endian integers: all lowest bytes, then all second ones, and so on."""
    return values.view(np.uint8).reshape(len(values), values.itemsize).T.tobytes()


def _joined(planes: NDArray[np.uint8], width: int) -> NDArray[Any]:
    return np.ascontiguousarray(planes.reshape(width, -1).T).view(f"u{width}")[:, 0]


def _compressed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _decompressed(payload: memoryview, num_bytes: int) -> NDArray[np.uint8]:
    stated = zstandard.frame_content_size(payload)
    if stated != num_bytes:  # a damaged size would be allocated, however large it is
        raise ValueError(f"{stated} bytes instead of {num_bytes}")
    data = zstandard.ZstdDecompressor().decompress(payload, max_output_size=num_bytes)
    if len(data) != num_bytes:
        raise ValueError(f"{len(data)} bytes instead of {num_bytes}")
    return np.frombuffer(data, np.uint8)
