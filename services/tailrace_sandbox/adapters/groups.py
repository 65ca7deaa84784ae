"""Cgroups (v2) for zygotes and their calls, where the service's own one is delegated to it.

Below the service's own group, or beside it where an earlier service moved it aside:

    tailrace-services     processes of the own group, for one whose children have limits holds none
    tailrace-sandbox-*    of one service, locked for as long as it lives
        zygote-*          a zygote and its call, with the limits of the call

Invariants: nothing below a service's group outlives it for longer than until the next service starts;
where no group can be made, everything is as before.
"""

import asyncio
import contextlib
import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tailrace.log import get_logger
from tailrace_sandbox.core.cgroups import NotDelegatedError, folder_of
from tailrace_sandbox.core.limits import MIB, Limits
from tailrace_sandbox.engine.group import held_bytes

log = get_logger(__name__)

_ASIDE = "tailrace-services"
_PREFIX = "tailrace-sandbox-"
_ZYGOTE = "zygote-"
_PROC = Path("/proc/self")
_MARKS = ("user.delegate", "trusted.delegate")  # by systemd, on what it delegated
_MAX_MOVES = 20  # of processes that others start meanwhile
_MEMORY, _PIDS = "memory", "pids"
_ROOM_BYTES = 4 * MIB  # by which a zygote may grow
_REMOVE_S, _REMOVE_POLL_S = 5.0, 0.01


class ZygoteGroup:
    """Group of one zygote."""

    def __init__(self, path: Path, *, counts_processes: bool) -> None:
        self.path = path
        self.counts_processes = counts_processes

    def limit(self, limits: Limits) -> None:
        """Set the limits of calls, beside what the zygote itself holds; it must be ready.

        Files may be in memory, so that the kernel's limit has room for them; the zygote's checks do not
        let other memory take it.
        """
        own_bytes = held_bytes(str(self.path)) + _ROOM_BYTES
        _write(self.path / "memory.max", str(own_bytes + limits.memory_bytes + limits.disk_bytes))
        with contextlib.suppress(FileNotFoundError):  # a kernel without swap
            _write(self.path / "memory.swap.max", "0")
        if self.counts_processes:
            own = int((self.path / "pids.current").read_text())
            _write(self.path / "pids.max", str(own + limits.max_processes))

    async def remove(self) -> None:
        """Remove it with what is left in it."""
        give_up_s = time.monotonic() + _REMOVE_S
        while not _is_removed(self.path):
            if time.monotonic() > give_up_s:
                log.warning("a cgroup stays until the next sandbox starts", path=str(self.path))
                return
            await asyncio.sleep(_REMOVE_POLL_S)


class Groups:
    """Group of the service, for those of its zygotes."""

    def __init__(self, path: Path, lock: int, *, counts_processes: bool) -> None:
        self.path = path
        self.counts_processes = counts_processes
        self._lock = lock

    @classmethod
    def open(cls, proc: Path = _PROC) -> "Groups":
        """Make the group; remove those of killed services. Raises `NotDelegatedError`."""
        parent = delegated_folder(proc)
        try:
            with _locked(parent):
                controllers = _enable(parent)
                _remove_left(parent)
                path = _new_folder(parent, _PREFIX)
                lock = _open_folder(path)
                fcntl.flock(lock, fcntl.LOCK_EX)
            _write(path / "cgroup.subtree_control", _plus(controllers))
        except OSError as error:
            raise NotDelegatedError(f"{parent}: {error.strerror}") from error
        return cls(path, lock, counts_processes=_PIDS in controllers)

    def make(self) -> ZygoteGroup:
        """A group without limits yet."""
        path = _new_folder(self.path, _ZYGOTE)
        return ZygoteGroup(path, counts_processes=self.counts_processes)

    def close(self) -> None:
        """Remove all groups of this service."""
        _remove_tree(self.path)
        os.close(self._lock)


def _new_folder(parent: Path, prefix: str) -> Path:
    path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    path.chmod(0o755)  # a zygote reads it as another user
    return path


def delegated_folder(proc: Path = _PROC) -> Path:
    """Folder of the group in which the service may make others; raises `NotDelegatedError`.

    `proc`: entry of this process below `/proc`. Changes nothing.
    """
    try:
        own = Path(folder_of((proc / "cgroup").read_text(), (proc / "mountinfo").read_text()))
        own = own.parent if own.name == _ASIDE else own
        if _MEMORY not in _words(own / "cgroup.controllers"):
            raise NotDelegatedError(f"{own} has no memory controller")
    except OSError as error:
        raise NotDelegatedError(f"{error.filename}: {error.strerror}") from error
    if not all(os.access(path, os.W_OK) for path in (own, own / "cgroup.procs")):
        raise NotDelegatedError(f"{own} may not be written")
    others = _processes(own) - {str(os.getpid())}
    if others and not _is_ours(own) and _MEMORY not in _words(own / "cgroup.subtree_control"):
        raise NotDelegatedError(f"{own} holds other processes and is not marked as delegated")
    return own


def _is_ours(own: Path) -> bool:
    """Tell whether all processes of the group may be moved: those of a container, or as marked."""
    return own.is_mount() or any(_mark(own, name) == b"1" for name in _MARKS)


def _mark(path: Path, name: str) -> bytes:
    try:
        return os.getxattr(path, name)
    except OSError:  # none, or not for us to see
        return b""


def _enable(own: Path) -> list[str]:
    """Let children of `own` have limits of memory, and of processes where there are such."""
    wanted = [name for name in (_MEMORY, _PIDS) if name in _words(own / "cgroup.controllers")]
    for _ in range(_MAX_MOVES):
        try:
            _write(own / "cgroup.subtree_control", _plus(wanted))
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            _move_aside(own)
        else:
            return wanted
    raise NotDelegatedError(f"{own} keeps having processes of its own")


def _move_aside(own: Path) -> None:
    aside = own / _ASIDE
    aside.mkdir(exist_ok=True)
    for process in _processes(own):
        with contextlib.suppress(ProcessLookupError):
            _write(aside / "cgroup.procs", process)


def _plus(controllers: list[str]) -> str:
    return " ".join(f"+{name}" for name in controllers)


def _processes(path: Path) -> set[str]:
    return set(_words(path / "cgroup.procs"))


def _words(path: Path) -> list[str]:
    return path.read_text().split()


def _write(path: Path, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)  # never makes a file
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _open_folder(path: Path) -> int:
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """One service after the other."""
    folder = _open_folder(path)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _remove_left(parent: Path) -> None:
    """Remove the groups of services that have ended, whose locks are free."""
    for path in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            folder = _open_folder(path)
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_tree(path)
            finally:
                os.close(folder)


def _remove_tree(path: Path) -> None:
    for child in path.glob(f"{_ZYGOTE}*"):
        _is_removed(child)
    _is_removed(path)


def _is_removed(path: Path) -> bool:
    """Kill what is in the group and remove it; False while something there is still dying."""
    try:
        _write(path / "cgroup.kill", "1")
    except FileNotFoundError:  # Linux before 5.14
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for process in _processes(path):
                os.kill(int(process), 9)
    try:
        path.rmdir()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True
