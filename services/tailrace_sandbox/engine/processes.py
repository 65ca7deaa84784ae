"""The processes of a call, as the zygote sees them: all are its descendants, in one process group.

A confined process cannot leave its group, so one signal reaches all of them at once, also while they
fork; and since the zygote adopts orphans, all can be counted and waited for.
"""

import contextlib
import os
import re
import signal
import socket
import stat
import time
from collections.abc import Iterator
from typing import NamedTuple

from tailrace_sandbox.engine.workspace import BLOCK_BYTES, CALL_PREFIX, UninspectableError

_REAP_TIMEOUT_S = 8.0
_REAP_POLL_S = 0.002
_STATUS = re.compile(rb"^(RssAnon|RssShmem|VmPTE|VmSwap|Threads):\s+(\d+)", re.MULTILINE)
_LONGEST_MAPPING = 160  # bytes of a line; more of them on average count as too many lines


Key = tuple[int, int]  # device and inode of a file


class StuckError(Exception):
    """Processes of a call did not end although they were killed."""


class Footprint(NamedTuple):
    """Resources that all processes of a call hold together."""

    num_processes: int  # threads count
    memory_bytes: int  # not backed by files, with what pipes and sockets can hold
    hidden_bytes: int  # on disk, in files without a name
    num_mappings: int


def _socket_bytes() -> int:
    """Most that the queue of one socket holds: its sender's default bound, and half of it again."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        return 3 * ours.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) // 2


_PIPE_BYTES = 65536
_OTHER_BYTES = 4096  # timers, events and lists of them
_QUEUE_BYTES = {stat.S_IFSOCK: _socket_bytes(), stat.S_IFIFO: _PIPE_BYTES}
_OF_A_CALL = f"/{CALL_PREFIX}".encode()
_COUNTS_RUNS = os.path.exists("/proc/self/schedstat")


class SeenProcess(NamedTuple):
    """Findings about a process while none of its threads ran.

    Only files change then, by the hands of others: their entries are looked at again.
    """

    ran: bytes  # how long and how often each of its threads ran
    objects: dict[Key, int]  # pipes and sockets, with the bytes that they can hold
    files: tuple[str, ...]  # names of the open files among its descriptors
    num_others: int
    num_mappings: int  # negative: it maps files of the call


Memory = dict[int, SeenProcess]  # of one look for the next, by pid


def descendants(pid: int) -> Iterator[tuple[int, list[str]]]:
    """Children of `pid` and theirs, by pid, with the ids of their threads; processes that end
    meanwhile may be missing.
    """
    waiting = [(pid, _list(f"/proc/{pid}/task"))]
    while waiting:
        parent, threads = waiting.pop()
        for thread in threads:
            for child in map(int, read(f"/proc/{parent}/task/{thread}/children").split()):
                entry = child, _list(f"/proc/{child}/task")
                yield entry
                waiting.append(entry)


def footprint(pid: int, max_processes: int, max_mappings: int, seen: Memory) -> Footprint:
    """Add up all descendants of `pid`, or those found until there are more than `max_processes` or
    `max_mappings`.

    Stopping there keeps the look short while processes multiply. `seen` is that of the last look, for
    processes that did not run since. Raises `UninspectableError` if a process hides what it holds.
    """
    num_processes = memory_bytes = num_mappings = 0
    hidden: dict[Key, int] = {}
    queues: dict[Key, int] = {}
    last = dict(seen)
    seen.clear()
    for descendant, tasks in descendants(pid):
        where, threads, held_bytes = _alive(descendant, tasks)
        num_processes += threads
        memory_bytes += held_bytes
        if num_processes > max_processes:
            break
        if not threads:
            continue
        ran = _ran(descendant, tasks)
        try:
            found = _held(where, ran, last.get(descendant), hidden, max_mappings - num_mappings)
        except PermissionError as error:
            if _alive(descendant, tasks)[1]:
                raise UninspectableError("a process hides its open files") from error
            continue
        seen[descendant] = found
        queues.update(found.objects)
        memory_bytes += found.num_others * _OTHER_BYTES
        num_mappings += abs(found.num_mappings)
        if num_mappings > max_mappings:
            break
    memory_bytes += sum(queues.values())
    return Footprint(num_processes, memory_bytes, sum(hidden.values()), num_mappings)


def _ran(pid: int, tasks: list[str]) -> bytes:
    """Times that the threads of a process ran; empty where the kernel does not count them."""
    times = [read(f"/proc/{pid}/task/{task}/schedstat", 64) for task in tasks]
    return b"".join(times) if all(times) and _COUNTS_RUNS else b""


def _held(
    where: str, ran: bytes, last: SeenProcess | None, hidden: dict[Key, int], max_mappings: int
) -> SeenProcess:
    """Open files and mappings of a process; deleted files go into `hidden`."""
    if last is None or not ran or ran != last.ran:
        objects, files, num_others = _open_files(where, hidden)
        num_mappings = _mappings(where, max_mappings, hidden)
        return SeenProcess(ran, objects, files, num_others, num_mappings)
    for name in last.files:
        with contextlib.suppress(FileNotFoundError):
            _add_hidden(os.stat(f"{where}/fd/{name}"), hidden)
    if last.num_mappings < 0:
        return last._replace(num_mappings=_mappings(where, max_mappings, hidden))
    return last


def is_awake(pid: int) -> bool:
    """Tell whether a thread of a descendant of `pid` runs, or would if something happened."""
    return any(
        read(f"/proc/{descendant}/task/{task}/stat").rpartition(b")")[2][1:2] in (b"R", b"S")
        for descendant, tasks in descendants(pid)
        for task in tasks
    )


def _alive(pid: int, tasks: list[str]) -> tuple[str, int, int]:
    """Entry below `/proc` that shows what a process holds, its threads and its bytes of memory.

    A process whose first thread ended shows them at another thread only. Zeros when it has ended or is
    about to.
    """
    threads, held_bytes = _status(f"/proc/{pid}")
    if held_bytes or threads == 0:
        return f"/proc/{pid}", threads if held_bytes else 0, held_bytes
    for task in tasks:
        where = f"/proc/{pid}/task/{task}"
        threads, held_bytes = _status(where)
        if held_bytes:
            return where, threads, held_bytes
    return "", 0, 0


def _status(where: str) -> tuple[int, int]:
    """Threads, and bytes of memory; zero bytes when it has ended or is about to."""
    threads = held_kib = 0
    for name, value in _STATUS.findall(read(f"{where}/status")):
        if name == b"Threads":
            threads = int(value)
        else:
            held_kib += int(value)
    return threads, held_kib * 1024


def _open_files(where: str, hidden: dict[Key, int]) -> tuple[dict[Key, int], tuple[str, ...], int]:
    """Pipes and sockets with their bytes, names of files, number of other objects.

    Deleted files go into `hidden`.
    """
    objects: dict[Key, int] = {}
    files, num_others = [], 0
    try:
        folder = os.open(f"{where}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return {}, (), 0
    try:
        for name in _list(folder):
            try:
                found = os.stat(name, dir_fd=folder)
            except FileNotFoundError:
                continue  # closed meanwhile
            kind = stat.S_IFMT(found.st_mode)
            if kind == stat.S_IFREG:
                files.append(name)
                _add_hidden(found, hidden)
            elif kind in _QUEUE_BYTES:
                objects[found.st_dev, found.st_ino] = _QUEUE_BYTES[kind]
            elif kind == 0:
                num_others += 1
    finally:
        os.close(folder)
    return objects, tuple(files), num_others


def _add_hidden(found: os.stat_result, hidden: dict[Key, int]) -> None:
    if found.st_nlink == 0 and stat.S_ISREG(found.st_mode):
        key = (found.st_dev, found.st_ino)
        hidden[key] = max(found.st_blocks * BLOCK_BYTES, hidden.get(key, 0))


def _mappings(where: str, most: int, hidden: dict[Key, int]) -> int:
    """Number of mappings, counted until there are more than `most`.

    Negative if files of a call are among them, which others may delete. Those that are mapped, closed
    and deleted go into `hidden`: their mapped part is all that can be known.
    """
    most_bytes = (most + 1) * _LONGEST_MAPPING
    text = read(f"{where}/maps", most_bytes)
    if len(text) >= most_bytes:
        return most + 1
    if b"(deleted)" in text:
        for line in text.splitlines():
            if line.endswith(b"(deleted)"):
                span, _, _, device, inode = line.split()[:5]
                begin, _, end = span.partition(b"-")
                major, _, minor = device.partition(b":")
                key = (os.makedev(int(major, 16), int(minor, 16)), int(inode))
                hidden[key] = max(int(end, 16) - int(begin, 16), hidden.get(key, 0))
    num_mappings = text.count(b"\n")
    return -num_mappings if _OF_A_CALL in text else num_mappings


def _list(path: str | int) -> list[str]:
    try:
        return os.listdir(path)
    except (FileNotFoundError, ProcessLookupError):
        return []


def read(path: str, most_bytes: int = 1 << 20) -> bytes:
    """Content of a file below `/proc`; empty when its process has ended."""
    pieces = []
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while most_bytes > 0 and (piece := os.read(fd, 65536)):
                pieces.append(piece)
                most_bytes -= len(piece)
        finally:
            os.close(fd)
    except (FileNotFoundError, ProcessLookupError):
        return b""
    return b"".join(pieces)


def send(group: int, number: int) -> None:
    """Send a signal to a whole call; nobody there is no error."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


def end(group: int) -> int:
    """Kill and wait for everything; the wait status of the first process.

    Raises `StuckError` for what does not die within 8 s.
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
    for pid, _ in descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
