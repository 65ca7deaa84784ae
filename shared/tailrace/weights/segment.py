"""Named shared memory that one process writes and others map.

A segment is a file in a memory file system. Its writer holds a lock on it for as long as it lives, so
that a successor can tell what was left behind by a dead one, and either adopts or deletes it. A
sealed segment is final: its manifest stands behind its bytes; nobody writes to it again, and deleting
it leaves the mappings that exist alone.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from tailrace.weights.errors import SegmentSpaceError, WeightsGoneError
from tailrace_protos.base import MalformedMessageError, decode, encode
from tailrace_protos.weights import WeightManifest

_NAME = re.compile(r"^tailrace\.[A-Za-z0-9_.-]+$")
_SEAL = b"TailSeal"
_SHARED_NOW = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # a page fault a page costs more
_UNBORN_S = 60.0  # a file that its creator did not even name by then has no creator any more


def default_folder() -> Path:
    """Where shared memory lives: `/dev/shm`, or the temporary folder on systems without it."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class SharedSegment:
    """A writable segment of this process. `data` is its buffer."""

    def __init__(self, path: Path, fd: int, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._fd = fd
        self.data = memoryview(mmap.mmap(fd, num_bytes, flags=_SHARED_NOW))

    @property
    def name(self) -> str:
        """How others find it."""
        return self.path.name

    def seal(self, manifest: WeightManifest) -> None:
        """Write the manifest behind the bytes: the segment is final and outlives its writer."""
        packed = encode(manifest)
        os.pwrite(self._fd, packed + len(packed).to_bytes(8, "little") + _SEAL, self.num_bytes)

    def close(self, *, delete: bool) -> None:
        """Give up the lock, and the name too if `delete`; what is mapped stays readable."""
        if delete:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


class SegmentFolder:
    """The segments of one role of one run."""

    def __init__(self, run: str, role: str, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()
        self._prefix = f"tailrace.{run}.{role}."

    def create(self, num_bytes: int) -> SharedSegment:
        """A new segment, its memory reserved; `SegmentSpaceError` when there is none."""
        # Pages that are not reserved would kill whoever writes to them with SIGBUS.
        return self._new(num_bytes, lambda fd: os.posix_fallocate(fd, 0, num_bytes))

    def copy_of(self, source_fd: int, num_bytes: int) -> SharedSegment:
        """A new segment with the bytes of an open file, copied by the kernel; errors as `create`."""
        return self._new(num_bytes, lambda fd: _copy_file(source_fd, fd, num_bytes))

    def _new(self, num_bytes: int, fill: Callable[[int], None]) -> SharedSegment:
        name = f"{self._prefix}{uuid.uuid4().hex[:12]}"
        unborn = self.folder / f".{name}"
        fd = os.open(unborn, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fill(fd)
            unborn.rename(self.folder / name)
        except OSError as error:
            os.close(fd)
            unborn.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise SegmentSpaceError(str(self.folder), num_bytes) from error
            raise
        return SharedSegment(self.folder / name, fd, num_bytes)

    def adopt(self) -> Iterator[tuple[WeightManifest, SharedSegment]]:
        """Sealed segments whose writers died, now ours; unsealed ones of dead writers are deleted."""
        for path, fd in self._abandoned():
            manifest = _sealed_manifest(fd)
            if manifest is None:
                path.unlink(missing_ok=True)
                os.close(fd)
            else:
                yield manifest, SharedSegment(path, fd, manifest.num_bytes)

    def sweep(self) -> int:
        """Delete what dead writers left; how many segments that were."""
        num_deleted = 0
        for path, fd in self._abandoned():
            path.unlink(missing_ok=True)
            os.close(fd)
            num_deleted += 1
        return num_deleted

    def _abandoned(self) -> Iterator[tuple[Path, int]]:
        """Files whose lock is free, which this process then holds."""
        for path in sorted(self.folder.glob(f"{self._prefix}*")):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            yield path, fd
        self._remove_unborn()

    def _remove_unborn(self) -> None:
        for path in self.folder.glob(f".{self._prefix}*"):
            if path.exists() and time.time() - path.stat().st_mtime > _UNBORN_S:
                path.unlink(missing_ok=True)


def open_segment(name: str, num_bytes: int, folder: Path | None = None) -> int:
    """A descriptor of another process's segment; `WeightsGoneError` when it is not there any more."""
    if not _NAME.match(name):
        raise WeightsGoneError(-1, f"{name!r} does not name a segment")
    try:
        fd = os.open((folder or default_folder()) / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsGoneError(-1, f"segment {name}: {error.strerror}") from error
    if os.fstat(fd).st_size < num_bytes:
        os.close(fd)
        raise WeightsGoneError(-1, f"segment {name} is smaller than its manifest says")
    return fd


def map_segment(fd: int, num_bytes: int) -> memoryview:
    """The bytes behind a descriptor, which is closed; writing to them changes only this mapping."""
    try:
        return memoryview(mmap.mmap(fd, num_bytes, access=mmap.ACCESS_COPY))
    finally:
        os.close(fd)


def _copy_file(source_fd: int, fd: int, num_bytes: int) -> None:
    num_copied = 0
    while num_copied < num_bytes:
        step = os.sendfile(fd, source_fd, num_copied, num_bytes - num_copied)
        if not step:
            raise WeightsGoneError(-1, f"the source shrank to {num_copied} bytes while it was copied")
        num_copied += step


def _sealed_manifest(fd: int) -> WeightManifest | None:
    """The manifest behind the bytes, if the file was finished."""
    size = os.fstat(fd).st_size
    tail = os.pread(fd, 16, max(0, size - 16))
    if len(tail) < 16 or tail[8:] != _SEAL:
        return None
    length = int.from_bytes(tail[:8], "little")
    packed = os.pread(fd, length, max(0, size - 16 - length))
    try:
        manifest = decode(packed, WeightManifest)
    except MalformedMessageError:
        return None
    return manifest if manifest.num_bytes + length + 16 == size else None
