"""Differences between versions give the later one bit for bit, or an error."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace.weights import ChecksumError, TensorBytes
from tailrace.weights.deltas import apply_deltas, encode_delta, same_layout
from tailrace.weights.tensors import fill, layout
from tailrace_protos.weights import WeightManifest

DTYPES = {"float8_e4m3fn": 1, "bfloat16": 2, "float32": 4, "float64": 8}


def version(
    number: int, *arrays: np.ndarray, dtype: str = "bfloat16"
) -> tuple[WeightManifest, memoryview]:
    """A version whose tensors have these bits."""
    tensors = [
        TensorBytes(f"w{at}", dtype, array.shape, memoryview(array.tobytes()))
        for at, array in enumerate(arrays)
    ]
    offsets, num_bytes = layout(tensors)
    buffer = memoryview(bytearray(num_bytes))
    return WeightManifest(number, "a", number, None, fill(buffer, tensors, offsets), num_bytes), buffer


def bits(count: int, width: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count * width, np.uint8).view(f"u{width}")


@given(
    dtype=st.sampled_from(sorted(DTYPES)),
    count=st.integers(1, 600),
    places=st.lists(st.integers(0, 599), max_size=40),
    seed=st.integers(0, 99),
)
def test_the_result_is_the_later_version_bit_for_bit(
    dtype: str, count: int, places: list[int], seed: int
) -> None:
    old, same = bits(count, DTYPES[dtype], seed), bits(5, DTYPES[dtype], seed + 1)
    new = old.copy()
    for place in places:
        new[place % count] ^= bits(1, DTYPES[dtype], seed + place)[0]
    before, old_bytes = version(1, old, same, dtype=dtype)
    after, new_bytes = version(2, new, same, dtype=dtype)
    kept = bytes(old_bytes)
    delta, payload = encode_delta(before, after, old_bytes, new_bytes)
    assert bytes(apply_deltas(after, [(delta, memoryview(payload))], old_bytes)) == bytes(new_bytes)
    assert bytes(old_bytes) == kept  # the baseline stays usable
    assert delta.num_bytes == len(payload)
    assert all(entry.tensor == 0 for entry in delta.entries)


def test_a_chain_of_deltas_gives_the_last_version() -> None:
    arrays = [bits(1000, 2, 0)]
    for step in (1, 2, 3):
        arrays.append(arrays[-1].copy())
        arrays[-1][step::50] += 1
    versions = [version(number, array) for number, array in enumerate(arrays)]
    chain = []
    for (before, old), (after, new) in itertools.pairwise(versions):
        delta, payload = encode_delta(before, after, old, new)
        chain.append((delta, memoryview(payload)))
    built = apply_deltas(versions[-1][0], chain, versions[0][1])
    assert bytes(built) == bytes(versions[-1][1])
    assert not isinstance(built.obj, bytearray)  # it would be copied under Python's lock


def test_few_changes_take_few_bytes() -> None:
    old = (
        np.random.default_rng(0)
        .standard_normal(100_000)
        .astype(np.float32)
        .view(np.uint16)[1::2]
        .copy()
    )
    new = old.copy()
    new[np.random.default_rng(1).choice(100_000, 1000, replace=False)] += (
        1  # one unit in the last place
    )
    before, old_bytes = version(1, old)
    after, new_bytes = version(2, new)
    delta, payload = encode_delta(before, after, old_bytes, new_bytes)
    assert delta.entries[0].num_changed == 1000
    assert len(payload) < 0.01 * after.num_bytes


@pytest.mark.parametrize("spoil", ["flip", "cut", "empty", "other_baseline"])
def test_a_wrong_payload_or_baseline_is_an_error_that_names_the_tensor(spoil: str) -> None:
    old = bits(4000, 2, 0)
    new = old.copy()
    new[::70] ^= 3
    before, old_bytes = version(1, old)
    after, new_bytes = version(2, new)
    delta, payload = encode_delta(before, after, old_bytes, new_bytes)
    spoiled = bytearray(payload)
    if spoil == "flip":
        spoiled[len(spoiled) // 2] ^= 0x40
    elif spoil == "cut":
        del spoiled[-9:]
    elif spoil == "empty":
        spoiled.clear()
    else:
        old_bytes = version(1, bits(4000, 2, 5))[1]
    with pytest.raises(ChecksumError, match=r"w0|number 0"):
        apply_deltas(after, [(delta, memoryview(spoiled))], old_bytes)


def test_a_damaged_size_in_a_payload_is_an_error_before_its_memory_is_taken() -> None:
    old = bits(4000, 2, 0)
    before, old_bytes = version(1, old)
    after, new_bytes = version(2, old ^ 1)
    delta, payload = encode_delta(before, after, old_bytes, new_bytes)
    magic, frame = payload[:4], bytes([0xE0])  # a size of eight bytes follows
    spoiled = magic + frame + (1 << 62).to_bytes(8, "little") + payload[5:]
    with pytest.raises(ChecksumError, match="w0"):
        apply_deltas(after, [(delta, memoryview(spoiled)[: delta.num_bytes])], old_bytes)


def test_versions_of_other_tensors_have_no_delta() -> None:
    base = version(1, bits(10, 2, 0))[0]
    assert same_layout(base, version(2, bits(10, 2, 1))[0])
    assert not same_layout(base, version(2, bits(11, 2, 1))[0])
    assert not same_layout(base, version(2, bits(10, 2, 1).reshape(2, 5))[0])
    assert not same_layout(base, version(2, bits(10, 2, 1), bits(1, 2, 1))[0])
    assert not same_layout(base, version(2, bits(10, 2, 1), dtype="float16")[0])
