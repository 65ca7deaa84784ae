"""Log of all chunks that an engine emitted, for audits of token fidelity.

A file is a sequence of records: a little-endian uint32 with the length of what follows, then an
`Emission` as msgpack. A killed process leaves at most one torn record, at the end; the next one that
appends to the file removes it.

Invariant: the log never stops the engine. A record that the disk refuses is left out and counted; the
first one is logged. An audit then finds missing tokens.
"""

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
    """A chunk and the id of its episode."""

    episode_id: str
    chunk: TokenChunk


class EmissionLog:
    """Appends records to one file, each with one unbuffered write."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path = path
        self._file = path.open("ab", buffering=0)
        self._num_bytes = _end_of_records(path)
        if self._num_bytes < self._file.tell():  # a killed process has left a torn record
            self._file.truncate(self._num_bytes)
        self.num_lost = 0

    def append(self, episode_id: str, chunk: TokenChunk) -> None:
        """Appends a chunk, or counts it as lost."""
        record = encode(Emission(episode_id, chunk))
        try:
            self._write(_LENGTH.pack(len(record)) + record)
        except OSError as error:
            if not self.num_lost:
                log.warning("emissions not written", path=str(self._path), reason=str(error))
            self.num_lost += 1
            metrics.LOST_EMISSIONS.inc()

    def _write(self, record: bytes) -> None:
        """Writes the whole record or nothing."""
        num_written = self._file.write(record)
        if num_written < len(record):
            self._file.truncate(self._num_bytes)
            raise OSError(errno.ENOSPC, f"only {num_written} of {len(record)} bytes were written")
        self._num_bytes += len(record)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _end_of_records(path: Path) -> int:
    """Bytes of the complete records of a file."""
    end, size = 0, path.stat().st_size
    with path.open("rb") as file:
        while end + _LENGTH.size <= size:
            next_end = end + _LENGTH.size + _LENGTH.unpack(file.read(_LENGTH.size))[0]
            if next_end > size:
                break
            end = file.seek(next_end)
    return end


def read_emissions(path: Path) -> Iterator[Emission]:
    """Complete records of a file, in the order of their emission."""
    data = path.read_bytes()
    decoder = msgspec.msgpack.Decoder(Emission)
    start = _LENGTH.size
    while start <= len(data):
        end = start + _LENGTH.unpack_from(data, start - _LENGTH.size)[0]
        if end > len(data):
            return
        yield decoder.decode(data[start:end])
        start = end + _LENGTH.size
