"""Limit of a call's processes where its user has others, which the kernel counts together.

Each `fork` and `clone` of the call waits until the zygote permits it (seccomp's user notification); a
signal with a handler may interrupt this wait (EINTR).
Invariants: processes and threads that exist, zombies included, and those that a permit may still bring
never number more than the limit; without a zygote nothing forks.
"""

import contextlib
import errno
import fcntl
import os
import struct
import time
from typing import NamedTuple

from tailrace_sandbox.engine import processes
from tailrace_sandbox.engine.holdings import read

_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_NOTIFICATION_BYTES = 80
_HEAD = struct.Struct("=QI")  # id, thread
_ANSWER = struct.Struct("=QqiI")  # id, value, error, flags
_CONTINUE = 1
_FORK_CPU_NS = 20_000_000  # no clone takes as much; a thread that used it since its permit is done
_RETRY_S = 0.001
_MAX_WAIT_S = 0.25  # then a fork near the limit is refused, whatever the others are doing


class _Request(NamedTuple):
    """One thread that waits in `fork` or `clone`."""

    id: int
    thread: int
    give_up_s: float  # monotonic


class ForkGate:
    """Answers for one call. `listener`: descriptor of its notifications, closed by `close`."""

    def __init__(self, listener: int, max_processes: int) -> None:
        self.listener = listener
        self._max_processes = max_processes
        self._most = 1  # that may exist, threads included: those of a count, and the permits since
        self._permits: dict[int, int] = {}  # processor time by thread that may still be in its clone
        self._waiting: list[_Request] = []

    def next_event_s(self) -> float:
        """Seconds until requests that wait are looked at again; negative: none waits."""
        return _RETRY_S if self._waiting else -1.0

    def receive(self) -> None:
        """Answer the next request."""
        notification = bytearray(_NOTIFICATION_BYTES)
        with contextlib.suppress(FileNotFoundError):  # it was killed meanwhile
            fcntl.ioctl(self.listener, _RECEIVE, notification)
            identity, thread = _HEAD.unpack_from(notification)
            self._permits.pop(thread, None)  # its last clone is over
            self._waiting.append(_Request(identity, thread, time.monotonic() + _MAX_WAIT_S))
            self.decide()

    def decide(self) -> None:
        """Permit the requests that fit, refuse those that do not, keep those in doubt."""
        while self._waiting:
            if self._most >= self._max_processes:
                self._count()
            if self._most < self._max_processes:
                self._permit(self._waiting.pop(0))
            elif not self._permits or time.monotonic() > self._waiting[0].give_up_s:
                self._answer(self._waiting.pop(0), -errno.EAGAIN, 0)
            else:
                return

    def _count(self) -> None:
        """Count what exists, after the permits whose clones are over: what these made is found."""
        over = [thread for thread, cpu_ns in self._permits.items() if _is_over(thread, cpu_ns)]
        for thread in over:
            del self._permits[thread]
        self._most = _num_existing() + len(self._permits)

    def _permit(self, request: _Request) -> None:
        self._most += 1
        self._permits[request.thread] = _cpu_ns(request.thread)
        self._answer(request, 0, _CONTINUE)

    def _answer(self, request: _Request, error: int, flags: int) -> None:
        with contextlib.suppress(FileNotFoundError):  # it was killed meanwhile
            fcntl.ioctl(self.listener, _SEND, _ANSWER.pack(request.id, 0, error, flags))

    def close(self) -> None:
        """Stop answering: forks fail from here on."""
        os.close(self.listener)


def _num_existing() -> int:
    """Processes and threads of the call, none left out.

    A walk misses a process whose parent ends before the walk reads its children. By then it is a child
    of the zygote, where the next walk finds it.
    """
    first, second = (
        {pid: len(tasks) for pid, tasks in processes.descendants(os.getpid())} for _ in range(2)
    )
    missed = [pid for pid in first.keys() - second.keys() if os.path.exists(f"/proc/{pid}")]
    return sum(second.values()) + sum(first[pid] for pid in missed)


def _is_over(thread: int, cpu_ns: int) -> bool:
    """Tell whether a thread has left the clone for which it had a permit at this processor time.

    It runs or waits for the disk in there, and sleeps only later.
    """
    state = read(f"/proc/{thread}/task/{thread}/stat").rpartition(b")")[2][1:2]
    return state not in (b"R", b"D") or _cpu_ns(thread) - cpu_ns > _FORK_CPU_NS


def _cpu_ns(thread: int) -> int:
    """Processor time; 0 where the kernel does not count it, so that running threads are never over."""
    return int(read(f"/proc/{thread}/task/{thread}/schedstat", 64).partition(b" ")[0] or b"0")
