"""Versions in the types that servers declare (`inference.weights_dtype`), from published ones.

| target | floating-point tensors become |
|---|---|
| `bfloat16` | bfloat16, rounded to the nearest, ties to even |
| `float8_e4m3fn` | matrices of linear layers: float8 in blocks of 128 x 128; the others: bfloat16 |

A block W of float8 numbers Q has a scale s: W = Q s. The scales of `<name>` are `<name>_scale_inv`,
float32 [rows / 128, columns / 128], directly behind it. Each is the least power of two with which the
block fits float8. So W is exact in bfloat16 and in float32, the same in every engine; and a scale
changes only when the largest number of a block crosses a power of two, so that differences between
versions stay small. Adapters keep their type. The module needs no torch.
"""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

from tailrace.weights.tensors import ALIGNMENT_BYTES, ITEM_BYTES, MAX_THREADS
from tailrace_protos.weights import TensorEntry, WeightManifest

TARGETS = ("bfloat16", "float8_e4m3fn")
SCALE = "_scale_inv"
BLOCK = 128

_FLOATS = ("float64", "float32", "float16", "bfloat16")
_ADAPTER = ".lora_"
_NOT_LINEAR = ("embed", "wte", "wpe", "lm_head", "router", ".gate.", "_gate.")
_E4M3_MAX = 448.0
_LEAST_EXPONENT = -100  # of a scale; far below the weights of any model


def planned(manifest: WeightManifest, target: str) -> WeightManifest | None:
    """Layout of a whole version in `target`, without checksums; None if nothing changes.

    Adapters (`base_version`) never change.
    """
    if manifest.base_version is not None:
        return None
    entries: list[TensorEntry] = []
    end = 0
    for entry in manifest.tensors:
        for name, dtype, shape in _parts(entry, target):
            num_bytes = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]
            entries.append(TensorEntry(name, dtype, shape, end, num_bytes, 0))
            end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if [entry.dtype for entry in entries] == [entry.dtype for entry in manifest.tensors]:
        return None
    return msgspec.structs.replace(manifest, tensors=tuple(entries), num_bytes=end, target=target)


def convert(
    manifest: WeightManifest, data: memoryview, plan: WeightManifest, buffer: memoryview
) -> WeightManifest:
    """Fills `buffer` with the version `data` in the layout of `plan`; returns it with checksums."""
    places = {entry.name: entry for entry in plan.tensors}

    def work(entry: TensorEntry) -> None:
        if not entry.num_bytes:
            return
        source = data[entry.offset : entry.offset + entry.num_bytes]
        made = places[entry.name]
        target = _bytes(made, buffer)
        if made.dtype == entry.dtype:
            target[:] = source
        elif made.dtype == "bfloat16":
            target.view(np.uint16)[:] = _to_bfloat16(_to_float32(entry.dtype, source))
        else:
            scales = _bytes(places[entry.name + SCALE], buffer).view(np.float32)
            matrix = _to_float32(entry.dtype, source).reshape(entry.shape)
            quantise(matrix, target.reshape(entry.shape), scales.reshape(scale_shape(entry.shape)))

    _in_threads(work, manifest.tensors)
    checked = tuple(
        msgspec.structs.replace(made, checksum=xxhash.xxh3_64_intdigest(_bytes(made, buffer).data))
        for made in plan.tensors
    )
    return msgspec.structs.replace(plan, tensors=checked)


def quantise(matrix: NDArray[Any], values: NDArray[np.uint8], scales: NDArray[np.float32]) -> None:
    """Writes float8 bits [R, C] and scales, `scale_shape`, of a float32 matrix [R, C]."""
    columns = np.arange(0, matrix.shape[1], BLOCK)
    for at, row in enumerate(range(0, matrix.shape[0], BLOCK)):
        rows = matrix[row : row + BLOCK]
        magnitudes = np.where(np.isfinite(rows), np.abs(rows), 0).max(axis=0)
        exponents = _exponents(np.maximum.reduceat(magnitudes, columns))
        scales[at] = np.ldexp(np.float32(1), exponents)
        factors = np.ldexp(np.float32(1), -exponents).repeat(BLOCK)[: matrix.shape[1]]
        values[row : row + BLOCK] = _to_e4m3(rows * factors)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the scales of a matrix."""
    return tuple(-(-size // BLOCK) for size in shape)


def _parts(entry: TensorEntry, target: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """Name, type and shape of each tensor that stands for one of the published version."""
    if entry.dtype not in _FLOATS or _ADAPTER in entry.name:
        return [(entry.name, entry.dtype, entry.shape)]
    if target == "float8_e4m3fn" and _is_linear(entry):
        scales = (entry.name + SCALE, "float32", scale_shape(entry.shape))
        return [(entry.name, target, entry.shape), scales]
    return [(entry.name, "bfloat16", entry.shape)]


def _is_linear(entry: TensorEntry) -> bool:
    is_matrix = len(entry.shape) == 2 and min(entry.shape) > 0 and entry.name.endswith(".weight")
    return is_matrix and not any(word in entry.name for word in _NOT_LINEAR)


def _bytes(entry: TensorEntry, buffer: memoryview) -> NDArray[np.uint8]:
    if not entry.num_bytes:
        return np.empty(0, np.uint8)
    return np.frombuffer(buffer[entry.offset : entry.offset + entry.num_bytes], np.uint8)


def _in_threads(work: Any, entries: Iterable[TensorEntry]) -> None:
    with ThreadPoolExecutor(MAX_THREADS, "weight-types") as pool:
        for _ in pool.map(work, entries):
            pass


def _exponents(magnitudes: NDArray[np.float32]) -> NDArray[np.int32]:
    """Exponents of the least powers of two that bring the magnitudes to at most 448."""
    mantissas, exponents = np.frexp(magnitudes / np.float32(_E4M3_MAX))
    least = exponents - (mantissas == 0.5)
    found: NDArray[np.int32] = np.where(magnitudes > 0, np.maximum(least, _LEAST_EXPONENT), 0).astype(
        np.int32
    )
    return found


def _to_float32(dtype: str, data: memoryview) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(data, np.dtype(dtype)).astype(np.float32, copy=False)


def _to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    bits = values.view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _to_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Bits of the nearest float8 numbers, ties to even; values are at most 448, or not finite (NaN)."""
    bits = values.view(np.uint32)
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = rounded - (120 << 3)  # exponent bias 127 -> 7
    tiny = np.rint(np.minimum(np.abs(values), np.float32(1)) * np.float32(512))  # steps of 2^-9
    found = np.where(magnitude < 121 << 23, np.nan_to_num(tiny).astype(np.uint32), normal)
    found = np.where(np.isfinite(values), found, 0x7F)
    signed: NDArray[np.uint8] = (found | ((bits >> 24) & 0x80)).astype(np.uint8)
    return signed
