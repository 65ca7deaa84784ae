"""The processes of a call, as the zygote sees them: all are its descendants, in one process group.

A confined process cannot leave its group, so one signal reaches all of them at once, also while they
fork; and since the zygote adopts orphans, all can be counted and waited for.
"""

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Set
from typing import NamedTuple

from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import holdings
from tailrace_sandbox.engine.holdings import listed, read
from tailrace_sandbox.engine.workspace import UninspectableError

_REAP_TIMEOUT_S = 8.0
_REAP_POLL_S = 0.002
_HELD = re.compile(
    rb"\nRssAnon:\s+(\d+) kB\nRssFile:\s+\d+ kB\nRssShmem:\s+(\d+) kB\n"
    rb".*?\nVmPTE:\s+(\d+) kB\n.*?VmSwap:\s+(\d+) kB\n.*?\nThreads:\s+(\d+)",
    re.DOTALL,
)
_SIGNALS = re.compile(rb"\nSigPnd:\s+(\w+)\nShdPnd:\s+(\w+)\nSigBlk:\s+(\w+)")
_THREADS = re.compile(rb"\nThreads:\s+(\d+)")
_SHARES = re.compile(
    rb"\nPss_Anon:\s+(\d+).*\nAnonymous:\s+(\d+).*\nSwap:\s+(\d+).*\nSwapPss:\s+(\d+)", re.DOTALL
)
_BLIND_S = 0.002  # of memory that grows, while shared memory is measured
_MAX_ROUNDS = 4  # of processes that come while shared memory is measured; later ones count whole


class StuckError(Exception):
    """Processes of a call did not end although they were killed."""


class Survey(NamedTuple):
    """Resources of all processes of a call that are cheap to read."""

    num_processes: int  # threads count
    memory_bytes: int  # not backed by files


def descendants(pid: int) -> Iterator[tuple[int, list[str]]]:
    """Children of `pid` and theirs, by pid, with the ids of their threads; processes that end
    meanwhile may be missing.
    """
    waiting = [(pid, listed(f"/proc/{pid}/task"))]
    while waiting:
        parent, threads = waiting.pop()
        for thread in threads:
            for child in _children(parent, [thread]):
                entry = child, listed(f"/proc/{child}/task")
                yield entry
                waiting.append(entry)


def _children(pid: int, threads: list[str]) -> list[int]:
    files = [f"/proc/{pid}/task/{thread}/children" for thread in threads]
    return [int(child) for file in files for child in read(file).split()]


class Surveyor:
    """Surveys the descendants of `pid` again and again; keeps their files below `/proc` open."""

    def __init__(self, pid: int, limits: Limits) -> None:
        self._pid = pid
        self._limits = limits
        self._kept: dict[int, tuple[int, int]] = {}  # by pid: status, children of the first thread
        # Of the last survey, those that hold memory: entry that shows it, threads, bytes.
        self._holders: dict[int, tuple[str, list[str], int]] = {}

    def survey(self) -> Survey:
        """Add up all descendants, or those found until there are too many.

        Stopping there keeps the look short while processes multiply. Raises `UninspectableError` if a
        process hides what it holds.
        """
        num_processes = memory_bytes = 0
        waiting = _children(self._pid, listed(f"/proc/{self._pid}/task"))
        last, self._kept, self._holders = self._kept, {}, {}
        try:
            while waiting and num_processes <= self._limits.max_processes:
                pid = waiting.pop()
                threads, held_bytes = _parsed(self._status_of(pid, last))
                where, tasks = f"/proc/{pid}", [str(pid)]
                if threads > 1:
                    tasks = listed(f"{where}/task")
                    if not held_bytes:
                        where, threads, held_bytes = _alive(pid, tasks)
                waiting += self._children_of(pid, tasks)
                if held_bytes:
                    num_processes += threads
                    memory_bytes += held_bytes
                    self._holders[pid] = where, tasks, held_bytes
        finally:
            _close(last)
        return Survey(num_processes, memory_bytes)

    def _status_of(self, pid: int, last: dict[int, tuple[int, int]]) -> bytes:
        """Status of a process, empty if it has ended; its files stay open for the next time."""
        files = last.pop(pid, None) or _open_pair(pid)
        status = _again(files[0]) if files else b""
        if files and status:
            self._kept[pid] = files
        elif files:
            _close({pid: files})  # also of a process that ended, whose number another has by now
        return status

    def _children_of(self, pid: int, tasks: list[str]) -> list[int]:
        first = _again(self._kept[pid][1]) if pid in self._kept else b""
        others = _children(pid, [one for one in tasks if one != str(pid)]) if len(tasks) > 1 else []
        return [*map(int, first.split()), *others]

    def num_descriptors(self) -> int:
        """Number of open descriptors of the processes of the last survey."""
        return sum(_num_descriptors(where, self._limits) for where, _, _ in self._holders.values())

    def distinct_bytes(self) -> int:
        """Memory of the processes of the last survey and of those since; what they share counts once.

        A process that ends meanwhile counts, since it made shares of others smaller. Takes 0.02 ms per
        MiB that the survey found; more memory than the limit, found meanwhile, is returned as it is.
        """
        shared: dict[int, int] = {}
        most = {pid: held_bytes for pid, (_, _, held_bytes) in self._holders.items()}
        for _ in range(_MAX_ROUNDS):
            survey = self._read_shares(most.keys() - shared.keys(), shared)
            if survey.memory_bytes > self._limits.memory_bytes:
                return survey.memory_bytes
            for pid, (_, _, held_bytes) in self._holders.items():
                most[pid] = max(held_bytes, most.get(pid, 0))
            if most.keys() == shared.keys():
                break
        distinct_bytes = sum(max(0, most[pid] - shared.get(pid, 0)) for pid in most)
        return min(survey.memory_bytes, distinct_bytes)

    def _read_shares(self, pids: Set[int], shared: dict[int, int]) -> Survey:
        """Put what these processes share into `shared`; the next survey, at once if it is too much."""
        next_s = time.monotonic() + _BLIND_S
        for pid in pids:
            shared[pid] = _shared(pid)
            if time.monotonic() > next_s:
                survey = self.survey()
                if survey.memory_bytes > self._limits.memory_bytes:
                    return survey
                next_s = time.monotonic() + _BLIND_S
        return self.survey()

    def largest_bytes(self) -> int:
        """Memory of the largest process of the last survey."""
        return max((held_bytes for _, _, held_bytes in self._holders.values()), default=0)

    def queues(self, hidden: holdings.Hidden) -> holdings.Queues:
        """Add up what the processes of the last survey have open; objects that several hold count once.

        Puts deleted files into `hidden`. Raises `UninspectableError`.
        """
        held = holdings.Held(hidden)
        for pid, (where, tasks, _) in self._holders.items():
            with _visible(pid, tasks):
                held.add(where)
        return held.queues()

    def num_mappings(self, hidden: holdings.Hidden) -> int:
        """Number of mappings of the processes of the last survey, or of those until there are too many.

        Puts deleted files into `hidden`. Raises `UninspectableError`.
        """
        most = self._limits.max_mappings
        for pid, (where, tasks, _) in self._holders.items():
            with _visible(pid, tasks):
                most -= holdings.mappings(where, most, hidden)
            if most < 0:
                break
        return self._limits.max_mappings - most

    def close(self) -> None:
        """Close what is open of processes."""
        _close(self._kept)
        self._kept = {}


def _close(kept: dict[int, tuple[int, int]]) -> None:
    for files in kept.values():
        for fd in files:
            os.close(fd)


def _open_pair(pid: int) -> tuple[int, int] | None:
    """Descriptors of a process's status and of its first thread's children; None if it has ended."""
    try:
        status = os.open(f"/proc/{pid}/status", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        return None
    try:
        return status, os.open(f"/proc/{pid}/task/{pid}/children", os.O_RDONLY | os.O_CLOEXEC)
    except (FileNotFoundError, ProcessLookupError):
        os.close(status)
        return None


def _again(fd: int) -> bytes:
    """Content of an open file below `/proc` now; empty when its process has ended."""
    try:
        return os.pread(fd, 65536, 0)
    except ProcessLookupError:
        return b""


@contextlib.contextmanager
def _visible(pid: int, tasks: list[str]) -> Iterator[None]:
    """Raise `UninspectableError` for a process that hides itself; one that just ends may."""
    try:
        yield
    except PermissionError as error:
        if _alive(pid, tasks)[1]:
            raise UninspectableError("a process hides what it holds") from error


def _shared(pid: int) -> int:
    """Bytes of a process's memory less its share of them; 0 where the kernel does not tell."""
    try:
        found = _SHARES.search(read(f"/proc/{pid}/smaps_rollup"))
    except PermissionError:  # another program, which shares nothing
        return 0
    if found is None:
        return 0
    share, anonymous, swap, swap_share = map(int, found.groups())
    return 1024 * (anonymous - share + swap - swap_share)


def _num_descriptors(where: str, limits: Limits) -> int:
    """Number of open descriptors; the most that there may be where the kernel does not tell."""
    try:
        return os.stat(f"{where}/fd").st_size or limits.max_open_files  # before Linux 6.2
    except (FileNotFoundError, ProcessLookupError):
        return 0


def awake(pid: int) -> dict[str, int | None]:
    """Threads of descendants of `pid` that run, or would if something happened.

    Each with the nanoseconds that it has run; None where the kernel does not tell.
    """
    found: dict[str, int | None] = {}
    for descendant, tasks in descendants(pid):
        for task in tasks:
            where = f"/proc/{descendant}/task/{task}"
            if read(f"{where}/stat").rpartition(b")")[2][1:2] in (b"R", b"S"):
                found[task] = int(read(f"{where}/schedstat", 64).partition(b" ")[0] or b"0") or None
    return found


def _alive(pid: int, tasks: list[str]) -> tuple[str, int, int]:
    """Entry below `/proc` that shows what a process holds, its threads and its bytes of memory.

    A process whose first thread ended shows them at another thread only. Zeros when it has ended or is
    about to.
    """
    threads, held_bytes = _parsed(read(f"/proc/{pid}/status"))
    if held_bytes or threads == 0:
        return f"/proc/{pid}", threads if held_bytes else 0, held_bytes
    for task in tasks:
        where = f"/proc/{pid}/task/{task}"
        threads, held_bytes = _parsed(read(f"{where}/status"))
        if held_bytes:
            return where, threads, held_bytes
    return "", 0, 0


def _parsed(status: bytes) -> tuple[int, int]:
    """Threads, and bytes of memory; zero bytes when it has ended or is about to."""
    if found := _HELD.search(status):
        anonymous, shared, tables, swap, threads = found.groups()
        return int(threads), 1024 * (int(anonymous) + int(shared) + int(tables) + int(swap))
    threads_alone = _THREADS.search(status)
    return int(threads_alone[1]) if threads_alone else 0, 0


def has_yet_to_receive(pid: int, number: int) -> bool:
    """Tell whether a signal waits for nothing but a processor, which its process has not had since."""
    status = read(f"/proc/{pid}/status")
    found = _SIGNALS.search(status)
    if found is None or b"\nState:\tR" not in status:
        return False
    own, shared, blocked = (int(mask, 16) for mask in found.groups())
    return bool((own | shared) & ~blocked & 1 << number - 1)


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
