"""Segments of another process, mapped once and read again with each version that is written there.

To map fresh pages costs more than the checksums over them. Invariant: bytes do not change while they
are referenced: as long as they are, the segment has the lock of a reader.
"""

import mmap
import os
import weakref
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tailrace.weights.errors import WeightsGoneError
from tailrace.weights.segment import begin_read, default_folder, end_read, open_segment


class _Mapping(NamedTuple):
    fd: int
    mapped: mmap.mmap


class SegmentMappings:
    """Mappings of one reader."""

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or default_folder()
        self._kept: dict[tuple[int, int], _Mapping] = {}  # by device and inode

    def read(self, name: str, num_bytes: int) -> memoryview:
        """Returns the bytes of a segment, which stay as they are while they are referenced.

        Raises `WeightsGoneError` if it does not exist any more, or its writer has begun to reuse it.
        """
        self._forget_deleted()
        fd = open_segment(name, num_bytes, self._folder)
        if not (begin_read(fd) and self._is_named(fd, name)):
            end_read(fd)
            raise WeightsGoneError(-1, f"segment {name} gets another version")
        status = os.fstat(fd)
        key = status.st_dev, status.st_ino
        kept = self._kept.get(key)
        if kept is None or len(kept.mapped) < num_bytes:
            self._forget(key)
            # Pages are mapped as the checksums read them: the kernel maps 16 at a fault, in several
            # threads at once, which is faster than all of them beforehand in one.
            mapped = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
            kept = self._kept[key] = _Mapping(os.dup(fd), mapped)
        view = np.frombuffer(kept.mapped, np.uint8, num_bytes)
        weakref.finalize(view, end_read, fd).atexit = False
        return view.data

    def close(self) -> None:
        """Forgets all mappings; what is referenced stays readable."""
        for key in [*self._kept]:
            self._forget(key)

    def _is_named(self, fd: int, name: str) -> bool:
        try:
            return os.path.samestat(os.stat(self._folder / name), os.fstat(fd))
        except FileNotFoundError:
            return False

    def _forget_deleted(self) -> None:
        """Gives the memory of deleted segments back."""
        for key, kept in [*self._kept.items()]:
            if not os.fstat(kept.fd).st_nlink:
                self._forget(key)

    def _forget(self, key: tuple[int, int]) -> None:
        kept = self._kept.pop(key, None)
        if kept is not None:
            os.close(kept.fd)
