"""Versions as safetensors files on a volume, which any program reads that knows the format.

A version is a folder `<policy_version>/` with `model.safetensors`; it is whole or absent. The file is
the size of its header in 8 bytes, the header in JSON, and the tensors without gaps.
"""

import json
import math
import mmap
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from tailrace.weights.errors import ChecksumError, ManifestError
from tailrace.weights.tensors import ITEM_BYTES, TensorBytes
from tailrace_protos.base import UNREADABLE, Count
from tailrace_protos.weights import TensorEntry, WeightManifest

FILE = "model.safetensors"
_UNFINISHED = ".unfinished-"
_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


def write_version(folder: Path, manifest: WeightManifest, data: memoryview) -> None:
    """Writes a version to its folder; does nothing if it is there. Raises `OSError` without room."""
    metadata = {
        "policy_version": str(manifest.policy_version),
        "lineage": manifest.lineage,
        "optimizer_step": str(manifest.optimizer_step),
    }
    packed = packed_header(manifest.tensors, metadata)
    if _begins_with(folder / FILE, packed):
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = folder.with_name(_UNFINISHED + folder.name)
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        with (unfinished / FILE).open("wb") as file:
            file.write(packed)
            for entry in manifest.tensors:
                file.write(data[entry.offset : entry.offset + entry.num_bytes])
            file.flush()
            os.fsync(file.fileno())
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier run of this name
        unfinished.rename(folder)
    except OSError:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _begins_with(path: Path, packed: bytes) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as file:
        return file.read(len(packed)) == packed


def remove_others(volume: Path, policy_versions: Collection[int]) -> None:
    """Deletes the folders of all versions but these, and unfinished ones."""
    kept = {str(policy_version) for policy_version in policy_versions}
    for folder in volume.glob("*"):
        is_ours = folder.name.isdigit() or folder.name.startswith(_UNFINISHED)
        if is_ours and folder.name not in kept:
            shutil.rmtree(folder, ignore_errors=True)


class _Place(msgspec.Struct):
    """Entry of a header; that of the metadata has no offsets."""

    data_offsets: tuple[Count, Count] = (0, 0)  # from the end of the header


def read_version(path: Path, manifest: WeightManifest) -> list[TensorBytes]:
    """Maps and verifies a file; raises `OSError`, `ManifestError` or `ChecksumError`."""
    with path.open("rb") as file:
        if not os.fstat(file.fileno()).st_size:
            raise ManifestError("", f"{path} is empty")
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    start = 8 + int.from_bytes(mapped[:8], "little")
    try:
        places = msgspec.json.decode(mapped[8:start], type=dict[str, _Place])
    except UNREADABLE as error:
        raise ManifestError("", f"{path} has no safetensors header") from error
    found: list[TensorBytes] = []
    for entry in manifest.tensors:
        begin, end = places.get(entry.name, _Place()).data_offsets
        data = mapped[start + begin : start + end]
        if data.nbytes != entry.num_bytes or xxhash.xxh3_64_intdigest(data) != entry.checksum:
            raise ChecksumError(entry.name, manifest.policy_version)
        found.append(TensorBytes(entry.name, entry.dtype, entry.shape, data))
    return found


def packed_header(tensors: Iterable[TensorEntry | TensorBytes], metadata: dict[str, str]) -> bytes:
    """The bytes before those of the tensors, which follow in the same order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for tensor in tensors:
        num_bytes = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
        offsets = [end, end := end + num_bytes]
        header[tensor.name] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
    packed = json.dumps(header).encode()
    packed += b" " * (-len(packed) % 8)
    return len(packed).to_bytes(8, "little") + packed
