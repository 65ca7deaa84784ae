"""The flat buffer of a version: layout, checksums, errors that name the tensor."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.weights import ChecksumError, ManifestError, TensorBytes
from tailrace.weights.tensors import (
    ALIGNMENT_BYTES,
    ITEM_BYTES,
    check_manifest,
    fill,
    layout,
    verify,
    views,
)
from tailrace_protos.base import decode, encode
from tailrace_protos.weights import WeightManifest

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def some_tensors(draw: st.DrawFn) -> list[TensorBytes]:
    """Tensors of all dtypes, empty and zero-dimensional ones included."""
    made = []
    for number in range(draw(st.integers(0, 6))):
        dtype, shape = draw(st.sampled_from(sorted(ITEM_BYTES))), draw(shapes)
        num_bytes = int(np.prod(shape, dtype=int)) * ITEM_BYTES[dtype]
        data = draw(st.binary(min_size=num_bytes, max_size=num_bytes))
        made.append(TensorBytes(f"t{number}", dtype, shape, memoryview(data)))
    made.append(TensorBytes("last", "bfloat16", (2,), memoryview(b"\x80\x3f\x00\x40")))
    return made


def packed(tensors: list[TensorBytes]) -> tuple[WeightManifest, bytearray]:
    offsets, num_bytes = layout(tensors)
    buffer = bytearray(num_bytes)
    entries = fill(memoryview(buffer), tensors, offsets)
    return WeightManifest(7, "a", 1, None, entries, num_bytes), buffer


@given(some_tensors())
def test_every_tensor_comes_back_byte_for_byte_from_an_aligned_place(
    tensors: list[TensorBytes],
) -> None:
    manifest, buffer = packed(tensors)
    received = decode(encode(manifest), WeightManifest)
    check_manifest(received)
    verify(received, memoryview(buffer))
    assert all(entry.offset % ALIGNMENT_BYTES == 0 for entry in received.tensors)
    assert list(views(received, memoryview(buffer))) == tensors


@given(some_tensors(), st.data())
def test_one_flipped_bit_is_found_and_its_tensor_named(
    tensors: list[TensorBytes], data: st.DataObject
) -> None:
    manifest, buffer = packed(tensors)
    entry = data.draw(st.sampled_from([entry for entry in manifest.tensors if entry.num_bytes]))
    position = entry.offset + data.draw(st.integers(0, entry.num_bytes - 1))
    buffer[position] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(ChecksumError) as caught:
        verify(manifest, memoryview(buffer))
    assert caught.value.tensor == entry.name
    assert caught.value.policy_version == 7


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([], "no weights"),
        ([TensorBytes("w", "float32", (2,), memoryview(bytes(4)))], "8 bytes, not 4"),
        ([TensorBytes("w", "float31", (1,), memoryview(bytes(4)))], "float31"),
        ([TensorBytes("w", "int8", (1,), memoryview(b"a"))] * 2, "twice"),
    ],
)
def test_tensors_that_contradict_themselves_are_refused(tensors: list[TensorBytes], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        layout(tensors)


@pytest.mark.parametrize(
    "change",
    [{"offset": 8}, {"offset": 0}, {"num_bytes": 5}, {"shape": (3, 3)}, {"offset": 1 << 20}],
)
def test_a_manifest_whose_tensors_lie_wrong_is_refused(change: dict[str, object]) -> None:
    tensors = [TensorBytes(n, "float32", (3,), memoryview(bytes(12))) for n in ("a", "b")]
    manifest, _ = packed(tensors)
    first, second = manifest.tensors
    broken = msgspec.structs.replace(second, **change)
    with pytest.raises(ManifestError):
        check_manifest(msgspec.structs.replace(manifest, tensors=(first, broken)))


def test_wider_views_than_bytes_are_taken_as_they_are() -> None:
    values = np.arange(6, dtype=np.float32)
    manifest, buffer = packed([TensorBytes("w", "float32", (2, 3), values.data)])
    (found,) = views(manifest, memoryview(buffer))
    assert np.array_equal(np.frombuffer(found.data, np.float32), values)
