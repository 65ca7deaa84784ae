"""Follow `metrics.jsonl`, which another process writes: it grows by whole lines, and is replaced by
another file of this name where steps are taken back."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from tailrace_learner.ports import Row

_decoder = msgspec.json.Decoder(Row)


class RowFile:
    """The rows of a file, those that come later too. `OSError` if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Kept open between reads, so that no file that replaces it gets its inode.
        self._file: BinaryIO | None = None
        self._offset = 0

    def read(self) -> tuple[list[Row], bool]:
        """Rows not read yet, and whether they are all rows of a file not read before."""
        if self._is_replaced():
            self.restart()
        is_other = self._file is None
        if self._file is None:
            if not self._path.exists():
                return [], False
            self._file = self._path.open("rb", buffering=0)
        self._file.seek(self._offset)
        content = self._file.read()
        num_bytes = content.rfind(b"\n") + 1  # what follows is being written
        self._offset += num_bytes
        return [_decoder.decode(line) for line in content[:num_bytes].splitlines()], is_other

    def restart(self) -> None:
        """Close it; the next read begins with the first row."""
        if self._file is not None:
            self._file.close()
        self._file, self._offset = None, 0

    def _is_replaced(self) -> bool:
        if self._file is None or not self._path.exists():
            return False
        here, there = os.fstat(self._file.fileno()), self._path.stat()
        return (here.st_dev, here.st_ino) != (there.st_dev, there.st_ino)
