"""Files of versions: whatever is wrong with one is an error, after which other ways are tried."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tailrace.weights import TensorBytes, WeightsError
from tailrace.weights.files import FILE, read_version, write_version
from tailrace.weights.tensors import fill, layout
from tailrace_protos.weights import WeightManifest


def written(folder: Path) -> tuple[Path, WeightManifest]:
    arrays = {"a": np.arange(6, dtype=np.float32), "b": np.ones(3, np.float32)}
    tensors = [
        TensorBytes(name, "float32", array.shape, memoryview(array).cast("B"))
        for name, array in arrays.items()
    ]
    offsets, num_bytes = layout(tensors)
    data = memoryview(bytearray(num_bytes))
    manifest = WeightManifest(1, "a", 1, None, fill(data, tensors, offsets), num_bytes)
    write_version(folder / "1", manifest, data)
    return folder / "1" / FILE, manifest


def with_header(content: bytes, header: object) -> bytes:
    end = 8 + int.from_bytes(content[:8], "little")
    packed = json.dumps(header).encode()
    return len(packed).to_bytes(8, "little") + packed + content[end:]


def test_a_version_comes_back_tensor_by_tensor(tmp_path: Path) -> None:
    path, manifest = written(tmp_path)
    found = {
        tensor.name: np.frombuffer(tensor.data, np.float32) for tensor in read_version(path, manifest)
    }
    assert found["a"].tolist() == [0, 1, 2, 3, 4, 5]
    assert found["b"].tolist() == [1, 1, 1]


@pytest.mark.parametrize("size", [0, 1, 8, 40])
def test_a_file_that_ends_too_early_is_no_version(tmp_path: Path, size: int) -> None:
    path, manifest = written(tmp_path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(WeightsError):
        read_version(path, manifest)


@pytest.mark.parametrize(
    "header",
    [[], 3, {"a": 1}, {"a": {"data_offsets": 24}}, {"a": {"data_offsets": [0, 2.5]}}, {"a": {"b": []}}],
    ids=str,
)
def test_a_file_with_another_header_is_no_version(tmp_path: Path, header: object) -> None:
    path, manifest = written(tmp_path)
    path.write_bytes(with_header(path.read_bytes(), header))
    with pytest.raises(WeightsError):
        read_version(path, manifest)
