"""Named shared memory: one process writes it, other processes map it.

A segment is a file in a memory file system. Its writer holds a lock on the file while it lives, so that
a successor recognises the segments of a dead writer and adopts or deletes them. A sealed segment is
final: its manifest follows its bytes and no process writes to it again. Existing mappings survive the
deletion of the file.
"""

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

_NAME = re.compile(r"^tailrace\.[A-Za-z0-9_.-]+\Z")
_SEAL = b"TailSeal"
_SHARED_NOW = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # cheaper than one page fault per page
_UNNAMED_S = 60.0  # an unnamed file of this age has lost its creator


def default_folder() -> Path:
    """Folder of shared memory: `/dev/shm`, or the temporary folder on systems without it."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


class SharedSegment:
    """Writable segment of this process; `data` is its buffer."""

    def __init__(self, path: Path, fd: int, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._fd = fd
        self.data = memoryview(mmap.mmap(fd, num_bytes, flags=_SHARED_NOW))

    @property
    def name(self) -> str:
        """Name under which other processes open it."""
        return self.path.name

    def seal(self, manifest: WeightManifest) -> None:
        """Writes the manifest behind the bytes: the segment is final and survives its writer."""
        packed = encode(manifest)
        os.pwrite(self._fd, packed + len(packed).to_bytes(8, "little") + _SEAL, self.num_bytes)

    def close(self, *, delete: bool) -> None:
        """Releases the lock, and deletes the file if `delete`; mappings stay readable."""
        if delete:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)


class SegmentFolder:
    """Segments of one role in one run."""

    def __init__(self, run: str, role: str, folder: Path | None = None) -> None:
        self.folder = folder or default_folder()
        self._prefix = f"tailrace.{run}.{role}."

    def create(self, num_bytes: int) -> SharedSegment:
        """Creates a segment with reserved memory; raises `SegmentSpaceError` without room."""
        # Without the reservation a write to a page without memory would end the process with SIGBUS.
        return self._new(num_bytes, lambda fd: os.posix_fallocate(fd, 0, num_bytes))

    def copy_of(self, source_fd: int, num_bytes: int) -> SharedSegment:
        """Creates a segment from an open file, copied by the kernel; errors as `create`."""
        return self._new(num_bytes, lambda fd: _copy_file(source_fd, fd, num_bytes))

    def _new(self, num_bytes: int, fill: Callable[[int], None]) -> SharedSegment:
        name = f"{self._prefix}{uuid.uuid4().hex[:12]}"
        unnamed = self.folder / f".{name}"
        fd = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fill(fd)
            unnamed.rename(self.folder / name)
        except OSError as error:
            os.close(fd)
            unnamed.unlink(missing_ok=True)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT):
                raise SegmentSpaceError(str(self.folder), num_bytes) from error
            raise
        return SharedSegment(self.folder / name, fd, num_bytes)

    def adopt(self) -> Iterator[tuple[WeightManifest, SharedSegment]]:
        """Takes over sealed segments of dead writers; deletes their unsealed ones."""
        for path, fd in self._abandoned():
            manifest = _sealed_manifest(fd)
            if manifest is None:
                path.unlink(missing_ok=True)
                os.close(fd)
            else:
                yield manifest, SharedSegment(path, fd, manifest.num_bytes)

    def sweep(self) -> int:
        """Deletes the segments of dead writers; returns their number."""
        num_deleted = 0
        for path, fd in self._abandoned():
            path.unlink(missing_ok=True)
            os.close(fd)
            num_deleted += 1
        return num_deleted

    def _abandoned(self) -> Iterator[tuple[Path, int]]:
        """Files without a locked writer; this process holds their lock then."""
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
        self._remove_unnamed()

    def _remove_unnamed(self) -> None:
        for path in self.folder.glob(f".{self._prefix}*"):
            if path.exists() and time.time() - path.stat().st_mtime > _UNNAMED_S:
                path.unlink(missing_ok=True)


def open_segment(name: str, num_bytes: int, folder: Path | None = None) -> int:
    """Opens another process's segment; raises `WeightsGoneError` when it no longer exists."""
    if not _NAME.match(name):
        raise WeightsGoneError(-1, f"{name!r} is not the name of a segment")
    try:
        fd = os.open((folder or default_folder()) / name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsGoneError(-1, f"segment {name}: {error.strerror}") from error
    if os.fstat(fd).st_size < num_bytes:
        os.close(fd)
        raise WeightsGoneError(-1, f"segment {name} is smaller than its manifest states")
    return fd


def map_segment(fd: int, num_bytes: int) -> memoryview:
    """Maps the bytes of a descriptor to read them, and closes it.

    Pages are mapped as the checksums read them: the kernel maps 16 at a fault, in several threads at
    once, which is faster than all of them beforehand in one.
    """
    try:
        return memoryview(mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ))
    finally:
        os.close(fd)


def _copy_file(source_fd: int, fd: int, num_bytes: int) -> None:
    num_copied = 0
    while num_copied < num_bytes:
        step = os.sendfile(fd, source_fd, num_copied, num_bytes - num_copied)
        if not step:
            raise WeightsGoneError(-1, f"the source shrank to {num_copied} bytes during the copy")
        num_copied += step


def _sealed_manifest(fd: int) -> WeightManifest | None:
    """The manifest behind the bytes, None if the file is not sealed."""
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
