"""Reads files that the scheduler writes: `metrics.jsonl` as it grows, the start of `events.jsonl`."""

import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from tailrace_learner.ports import MetricsRow

_decoder = msgspec.json.Decoder(MetricsRow)
_AT_ONCE_BYTES = 1 << 20


class RowFile:
    """The rows of `metrics.jsonl`, as the file grows.

    It grows by whole lines. Where steps are taken back, another file replaces it under the same name.
    `OSError` if it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        # Kept open between reads, so that no file that replaces it gets its inode.
        self._file: BinaryIO | None = None
        self._offset = 0

    def read(self) -> tuple[list[MetricsRow], bool]:
        """The next rows not read yet, and True if they are the first ones of a file not read before.

        Returns no rows once all were read: the rows of a long run are too large for one reading.
        """
        if self._is_replaced():
            self.restart()
        is_other = self._file is None
        if self._file is None:
            if not self._path.exists():
                return [], False
            self._file = self._path.open("rb", buffering=0)
        self._file.seek(self._offset)
        content = self._file.read(_AT_ONCE_BYTES)
        if b"\n" not in content:  # a longer line
            content += self._file.read()
        num_bytes = content.rfind(b"\n") + 1  # the rest is a line that is being written
        self._offset += num_bytes
        return [_decoder.decode(line) for line in content[:num_bytes].splitlines()], is_other

    def restart(self) -> None:
        """Close the file; the next read begins with the first row."""
        if self._file is not None:
            self._file.close()
        self._file, self._offset = None, 0

    def _is_replaced(self) -> bool:
        if self._file is None or not self._path.exists():
            return False
        here, there = os.fstat(self._file.fileno()), self._path.stat()
        return (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)


class _FirstEvent(msgspec.Struct):
    """The part of the first line of `events.jsonl` that is needed."""

    unix_s: float


def run_start_unix_s(run_dir: Path) -> float:
    """Time of the run's first event; rows count their `time_s` from it."""
    with (run_dir / "events.jsonl").open("rb") as events:
        return msgspec.json.decode(events.readline(), type=_FirstEvent).unix_s
