"""What a process and its parent say to each other through pipes: length, then msgpack."""

from __future__ import annotations

import struct

import msgspec

HEADER = struct.Struct("<I")


def frame(message: object) -> bytes:
    """A message as it goes through a pipe."""
    data = msgspec.msgpack.encode(message)
    return HEADER.pack(len(data)) + data
