"""The newest version as a file in the state directory: whole or absent, on disk once `save` returns."""

from __future__ import annotations

import os
from pathlib import Path

from tailrace_protos.base import MalformedMessageError, decode, encode
from tailrace_protos.weights import WeightManifest

_LENGTH_BYTES = 8


class SnapshotFile:
    """`<length of manifest><manifest><bytes>` at `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def save(self, manifest: WeightManifest, data: memoryview) -> None:
        """Replace the file; `OSError` when the disk does not take it, the old one stays then."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        packed = encode(manifest)
        unfinished = self.path.with_suffix(".unfinished")
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
        """What was saved last; None when there is nothing readable. Bytes are not verified."""
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
