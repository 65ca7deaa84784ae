"""Memory of versions that arrive: as bytes are, and never made or copied under Python's lock."""

from __future__ import annotations

import numpy as np
import pytest

from tailrace.weights.buffers import copied, new_buffer


@pytest.mark.parametrize("num_bytes", [0, 1, 3 << 20])
def test_a_buffer_takes_bytes_anywhere(num_bytes: int) -> None:
    buffer = new_buffer(num_bytes)
    assert (buffer.nbytes, buffer.format, buffer.readonly) == (num_bytes, "B", False)
    given = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    half = num_bytes // 2
    buffer[:half], buffer[half:] = given.data[:half], given.data[half:]
    assert bytes(buffer) == given.tobytes()
    assert not isinstance(buffer.obj, bytearray)


def test_a_copy_has_the_same_bytes_and_shares_none() -> None:
    given = memoryview(b"weights of a version")
    copy = copied(given)
    assert copy == given
    copy[0] = 0
    assert given[0] == ord("w")
    assert not isinstance(copy.obj, bytearray)
