"""Named shared memory: one process writes it, other processes map it.

A segment is a file in a memory file system. Its writer holds a lock on the file while it lives, so that
a successor recognises the segments of a dead writer and adopts or deletes them. A sealed segment is
final: its manifest follows its bytes. Existing mappings survive the deletion of the file.

A retired segment has no name any more. The next one of its size is written over it, since fresh memory
costs more than the copy itself: all readers hold another lock (`begin_read`) as long as they use the
bytes, and the writer does not reuse what is locked, or used in its own process.
"""

import errno
import fcntl
import mmap
import os
import re
import struct
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from tailrace.weights.errors import SegmentSpaceError, WeightsGoneError
from tailrace_protos.base import MalformedMessageError, decode, encode
from tailrace_protos.weights import WeightManifest

NO_ROOM = (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)  # numbers of errors for a full file system
_NAME = re.compile(r"^tailrace\.[A-Za-z0-9_.-]+\Z")
_SEAL = b"TailSeal"
_SHARED_NOW = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # cheaper than one page fault per page
_RETIRED = ".retired"  # end of the name of an unnamed file whose creator is done
# Locks of an open file, not of a process; systems without them reuse nothing.
_SET_LOCK: int | None = getattr(fcntl, "F_OFD_SETLK", None)
_UNNAMED_S = 60.0  # an unnamed file of this age has lost its creator


def default_folder() -> Path:
    """Folder of shared memory: `/dev/shm`, or the temporary folder on systems without it."""
    shm = Path("/dev/shm")
    return shm if shm.is_dir() and os.access(shm, os.W_OK) else Path(tempfile.gettempdir())


def begin_read(fd: int) -> bool:
    """Locks a segment for a reader; False if its writer has begun to reuse it."""
    return _lock(fd, fcntl.F_RDLCK) not in (errno.EAGAIN, errno.EACCES)


def end_read(fd: int) -> None:
    """Ends the lock and closes the descriptor, of which a mapping has a duplicate."""
    _lock(fd, fcntl.F_UNLCK)
    os.close(fd)


def _lock(fd: int, kind: int) -> int:
    """Returns the number of the error, 0 without one."""
    if _SET_LOCK is None:
        return errno.ENOLCK
    try:
        fcntl.fcntl(fd, _SET_LOCK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 0, 0))
    except OSError as error:
        return error.errno or errno.ENOLCK
    return 0


class SharedSegment:
    """Writable segment of this process."""

    def __init__(self, path: Path, fd: int, num_bytes: int) -> None:
        self.path = path
        self.num_bytes = num_bytes
        self._fd = fd
        self._mapped = mmap.mmap(fd, num_bytes, flags=_SHARED_NOW)

    @property
    def data(self) -> memoryview:
        """Its bytes, readable as long as they are referenced."""
        return memoryview(self._mapped)

    @property
    def name(self) -> str:
        """Name under which other processes open it."""
        return self.path.name

    def seal(self, manifest: WeightManifest) -> None:
        """Writes the manifest behind the bytes: the segment is final and survives its writer."""
        packed = encode(manifest)
        os.pwrite(self._fd, packed + len(packed).to_bytes(8, "little") + _SEAL, self.num_bytes)

    def rename(self, path: Path) -> None:
        """Gives it another name; readers hold what they have mapped."""
        self.path = self.path.rename(path)

    def begin_reuse(self) -> bool:
        """Keeps readers out and cuts the manifest off; False while anybody uses the bytes."""
        if _lock(self._fd, fcntl.F_WRLCK):
            return False
        try:
            self._mapped.resize(self.num_bytes)  # refuses while this process has views
        except (BufferError, SystemError, OSError):  # SystemError: a system without mremap
            return False
        return True

    def end_reuse(self, path: Path, fill: Callable[[int], None]) -> None:
        """Writes new bytes by `fill`, and lets readers in under a new name."""
        fill(self._fd)
        self.rename(path)
        _lock(self._fd, fcntl.F_UNLCK)

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
        self._retired: SharedSegment | None = None

    def create(self, num_bytes: int) -> SharedSegment:
        """Creates a segment with reserved memory; raises `SegmentSpaceError` without room."""
        # Without the reservation a write to a page without memory would end the process with SIGBUS.
        return self._new(num_bytes, lambda fd: os.posix_fallocate(fd, 0, num_bytes))

    def copy_of(self, source_fd: int, num_bytes: int) -> SharedSegment:
        """Creates a segment from an open file, copied by the kernel; errors as `create`."""
        return self._new(num_bytes, lambda fd: _copy_file(source_fd, fd, num_bytes))

    def retire(self, segment: SharedSegment) -> None:
        """Takes the name of a segment of this folder away; the next one of its size replaces it."""
        self.forget_retired()
        try:
            segment.rename(self.folder / f".{segment.name}{_RETIRED}")
        except FileNotFoundError:  # deleted by others
            segment.close(delete=False)
        else:
            self._retired = segment

    def forget_retired(self) -> None:
        """Deletes the retired segment."""
        retired, self._retired = self._retired, None
        if retired is not None:
            retired.close(delete=True)

    def _reused(self, num_bytes: int, path: Path, fill: Callable[[int], None]) -> SharedSegment | None:
        retired, self._retired = self._retired, None
        if retired is None:
            return None
        with ExitStack() as undo:
            undo.callback(retired.close, delete=True)
            if retired.num_bytes != num_bytes or not retired.begin_reuse():
                return None
            try:
                retired.end_reuse(path, fill)
            except FileNotFoundError:  # deleted by others
                return None
            undo.pop_all()
        return retired

    def _new(self, num_bytes: int, fill: Callable[[int], None]) -> SharedSegment:
        name = f"{self._prefix}{uuid.uuid4().hex[:12]}"
        if (reused := self._reused(num_bytes, self.folder / name, fill)) is not None:
            return reused
        unnamed = self.folder / f".{name}"
        fd = os.open(unnamed, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            fill(fd)
            unnamed.rename(self.folder / name)
        except OSError as error:
            os.close(fd)
            unnamed.unlink(missing_ok=True)
            if error.errno in NO_ROOM:
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
        """Segments of dead writers, locked."""
        yield from self._unlocked(f"{self._prefix}*")
        self._remove_unnamed()

    def _remove_unnamed(self) -> None:
        for path, fd in self._unlocked(f".{self._prefix}*{_RETIRED}"):
            path.unlink(missing_ok=True)
            os.close(fd)
        for path in self.folder.glob(f".{self._prefix}*"):
            is_retired = path.name.endswith(_RETIRED)
            if not is_retired and path.exists() and time.time() - path.stat().st_mtime > _UNNAMED_S:
                with suppress(PermissionError):  # another user's
                    path.unlink(missing_ok=True)

    def _unlocked(self, pattern: str) -> Iterator[tuple[Path, int]]:
        """Files without a locked writer; this process holds their lock then."""
        for path in sorted(self.folder.glob(pattern)):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except (FileNotFoundError, PermissionError):  # the latter: another user's
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            yield path, fd


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


def _copy_file(source_fd: int, fd: int, num_bytes: int) -> None:
    num_copied = os.lseek(fd, 0, os.SEEK_SET)
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
