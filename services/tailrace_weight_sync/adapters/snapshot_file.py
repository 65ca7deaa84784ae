"""The newest version in a file, which survives a restart of the host."""

import os
import threading
from pathlib import Path

from tailrace_protos.base import MalformedMessageError, decode, encode
from tailrace_protos.weights import WeightManifest

_LENGTH_BYTES = 8  # before the manifest


class SnapshotFile:
    """One version in a file: `<length of manifest><manifest><bytes>`.

    The file is whole or absent, and on disk once `save` returns. Saves of several threads wait for each
    other.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._turn = threading.Lock()

    def save(self, manifest: WeightManifest, data: memoryview) -> None:
        """Replaces the file; raises `OSError` when the disk is full, the old file stays then."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        packed = encode(manifest)
        unfinished = self.path.with_suffix(".unfinished")
        with self._turn:
            try:
                with unfinished.open("wb") as file:
                    file.write(len(packed).to_bytes(_LENGTH_BYTES, "little"))
                    file.write(packed)
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.replace(self.path)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise

    def load(self) -> tuple[WeightManifest, memoryview] | None:
        """The saved version, or None without a readable file. The bytes are not verified."""
        try:
            content = memoryview(self.path.read_bytes())
        except FileNotFoundError:
            return None
        length = int.from_bytes(content[:_LENGTH_BYTES], "little")
        end = _LENGTH_BYTES + length
        try:
            return decode(content[_LENGTH_BYTES:end], WeightManifest), content[end:]
        except MalformedMessageError:
            return None
