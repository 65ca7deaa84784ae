"""The processes of a call, as the zygote sees them: all are its descendants, in one process group.

A confined process cannot leave its group, so one signal reaches all of them at once, also while they
fork; and since the zygote adopts orphans, all can be counted and waited for.
"""

import os
import signal
import stat
import time
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from tailrace_sandbox.engine.workspace import BLOCK_BYTES, UninspectableError

_REAP_TIMEOUT_S = 5.0
_REAP_POLL_S = 0.002


class StuckError(Exception):
    """Processes of a call did not end although they were killed."""


class Footprint(NamedTuple):
    """Resources that all processes of a call hold together."""

    num_processes: int  # threads count
    memory_bytes: int  # not backed by files
    hidden_bytes: int  # on disk, in files without a name


def descendants(pid: int) -> Iterator[int]:
    """Children of `pid` and theirs, by pid; processes that end meanwhile may be missing."""
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        try:
            threads = os.listdir(f"/proc/{parent}/task")
        except FileNotFoundError:
            continue
        for thread in threads:
            children = _read(f"/proc/{parent}/task/{thread}/children").split()
            yield from map(int, children)
            waiting += map(int, children)


def footprint(pid: int, max_processes: int) -> Footprint:
    """Add up all descendants of `pid`, or those found until there are more than `max_processes`.

    Stopping there keeps the look short while processes multiply. Raises `UninspectableError` if a
    process hides what it holds.
    """
    num_processes = memory_bytes = 0
    hidden: dict[tuple[int, int], int] = {}
    for descendant in descendants(pid):
        threads, held_bytes = _status(descendant)
        num_processes += threads
        memory_bytes += held_bytes
        if num_processes > max_processes:
            break
        try:
            for file, num_bytes in chain(_deleted_files(descendant), _deleted_mappings(descendant)):
                hidden[file] = max(num_bytes, hidden.get(file, 0))
        except PermissionError as error:
            if _status(descendant)[0]:
                raise UninspectableError("a process hides its open files") from error
    return Footprint(num_processes, memory_bytes, sum(hidden.values()))


def _status(pid: int) -> tuple[int, int]:
    """Threads and bytes of memory of a process; zeros when it has ended or is about to."""
    threads = held_kib = 0
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(("RssAnon:", "RssShmem:", "VmPTE:")):
            held_kib += int(line.split()[1])
        elif line.startswith("Threads:"):
            threads = int(line.split()[1])
    return (threads, held_kib * 1024) if held_kib else (0, 0)


def _deleted_files(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    for name in names:
        try:
            found = os.stat(f"{folder}/{name}")
        except FileNotFoundError:
            continue  # closed meanwhile
        if found.st_nlink == 0 and stat.S_ISREG(found.st_mode):
            yield (found.st_dev, found.st_ino), found.st_blocks * BLOCK_BYTES


def _deleted_mappings(pid: int) -> Iterator[tuple[tuple[int, int], int]]:
    """Files that are mapped, closed and deleted; their mapped part is all that can be known."""
    for line in _read(f"/proc/{pid}/maps").splitlines():
        if line.endswith("(deleted)"):
            span, _, _, device, inode = line.split()[:5]
            begin, _, end = span.partition("-")
            major, _, minor = device.partition(":")
            key = (os.makedev(int(major, 16), int(minor, 16)), int(inode))
            yield key, int(end, 16) - int(begin, 16)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def send(group: int, number: int) -> None:
    """Send a signal to a whole call; nobody there is no error."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def end(group: int) -> int:
    """Kill and wait for everything; the wait status of the first process.

    Raises `StuckError` for what does not die within 5 s.
    """
    send(group, signal.SIGKILL)
    status = 0
    give_up_s = time.monotonic() + _REAP_TIMEOUT_S
    while True:
        try:
            pid, one_status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == group:
            status = one_status
        elif pid == 0:
            if time.monotonic() > give_up_s:
                raise StuckError(f"{len(list(descendants(os.getpid())))} processes do not end")
            _kill_stragglers(group)
            time.sleep(_REAP_POLL_S)


def _kill_stragglers(group: int) -> None:
    """Kill again, and one by one: the second fence, should a process have left the group."""
    send(group, signal.SIGKILL)
    for pid in descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
