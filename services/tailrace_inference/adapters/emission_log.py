"""The record of everything an engine emitted, for audits of token fidelity.

A file is a sequence of records: a little-endian uint32 with the length of what follows, then an
`Emission` as msgpack. A process killed in the middle leaves at most one torn record at the end.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tailrace_protos.base import encode
from tailrace_protos.generation import TokenChunk

_LENGTH = struct.Struct("<I")


class Emission(msgspec.Struct, frozen=True, array_like=True):
    """A chunk with the episode it belongs to."""

    episode_id: str
    chunk: TokenChunk


class EmissionLog:
    """Appends to one file; each record is handed to the system at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab", buffering=0)

    def append(self, episode_id: str, chunk: TokenChunk) -> None:
        """Write one chunk down; raises `OSError` when the disk does not take it."""
        record = encode(Emission(episode_id, chunk))
        self._file.write(_LENGTH.pack(len(record)) + record)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_emissions(path: Path) -> Iterator[Emission]:
    """All whole records of a file, in the order in which they were emitted."""
    data = path.read_bytes()
    decoder = msgspec.msgpack.Decoder(Emission)
    start = _LENGTH.size
    while start <= len(data):
        end = start + _LENGTH.unpack_from(data, start - _LENGTH.size)[0]
        if end > len(data):
            return
        yield decoder.decode(data[start:end])
        start = end + _LENGTH.size
