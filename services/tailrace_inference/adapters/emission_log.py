"""The record of everything an engine emitted, for audits of token fidelity.

A file is a sequence of records: a little-endian uint32 with the length of what follows, then an
`Emission` as msgpack. A process killed in the middle leaves at most one torn record at the end.

Invariant: the log never stops the engine. What the disk does not take is left out, counted, and said
once; an audit then finds that tokens are missing.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tailrace.log import get_logger
from tailrace_inference import metrics
from tailrace_protos.base import encode
from tailrace_protos.generation import TokenChunk

log = get_logger(__name__)

_LENGTH = struct.Struct("<I")


class Emission(msgspec.Struct, frozen=True, array_like=True):
    """A chunk with the episode it belongs to."""

    episode_id: str
    chunk: TokenChunk


class EmissionLog:
    """Appends to one file; each record is handed to the system at once."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._num_bytes = self._file.tell()
        self.num_lost = 0

    def append(self, episode_id: str, chunk: TokenChunk) -> None:
        """Write one chunk down, or count it as lost."""
        record = encode(Emission(episode_id, chunk))
        try:
            self._write(_LENGTH.pack(len(record)) + record)
        except OSError as error:
            if not self.num_lost:
                log.warning("emissions are lost", path=str(self._path), reason=str(error))
            self.num_lost += 1
            metrics.LOST_EMISSIONS.inc()

    def _write(self, record: bytes) -> None:
        """Write all of the record or nothing of it."""
        num_written = self._file.write(record)
        if num_written < len(record):
            self._file.truncate(self._num_bytes)
            raise OSError(errno.ENOSPC, f"only {num_written} of {len(record)} bytes were taken")
        self._num_bytes += len(record)

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
