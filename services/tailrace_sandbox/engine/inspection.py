"""Looks at everything that a call holds, at a cost that is small beside what the call does.

Each look reads memory, threads and the number of descriptors. The objects behind the descriptors, the
mappings and the files of the call are read one by one when the call could hold more than its limits by
now, and as often as 0.4% of a core allows: at each look for a few processes, every 4 s at least. It
could if the pipes that its user may have, and the sockets, kernel memory and disk blocks that are in
more use on the machine since the last time, were all its own.
"""

import itertools
import os
import time
from typing import NamedTuple

from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import processes, workspace
from tailrace_sandbox.engine.processes import PIPE_BYTES, SOCKET_BYTES, Survey

_COUNT_SHARE, _MAX_COUNT_S = 0.004, 4.0  # of a core, for counts that nothing else demands
_PAGE_BYTES = 4096
_SMALL_PIPE_BYTES = 2 * _PAGE_BYTES  # of those of a user with too many
_MAPPING_BYTES = 160  # of kernel memory, at least
_SOCKETS, _KERNEL_KIB = b"sockets: used ", b"SUnreclaim:"


class Machine(NamedTuple):
    """Things in use that the kernel counts for all processes together."""

    num_sockets: int
    kernel_bytes: int  # that it cannot reclaim, mappings among them


class Inspection:
    """Of one call in `folder`. `tells_room`: the file system tells at once how much room is left."""

    def __init__(self, folder: str, limits: Limits, tells_room: bool) -> None:
        self._folder = folder
        self._limits = limits
        self._tells_room = tells_room
        self._surveyor = processes.Surveyor(os.getpid(), limits)
        self._count_s = 0.0  # monotonic, of the next count in any case
        self._held = processes.Holdings(0, 0, 0, 0)
        self._used = workspace.Usage(0, 0)
        self._room = workspace.Room(0, 0)
        self._machine = Machine(0, 0)
        self.room_bytes = 0  # of memory, after the last look

    def look(self) -> str:
        """Name of the broken limit; empty: none. Raises `UninspectableError` and `OSError`."""
        limits = self._limits
        found = self._surveyor.survey()
        if found.num_processes > limits.max_processes:
            return "processes"
        if time.monotonic() >= self._count_s or self._may_exceed(found):
            self._count()
        if self._held.num_mappings > limits.max_mappings:
            return "mappings"
        self.room_bytes = limits.memory_bytes - found.memory_bytes - self._held.queue_bytes
        if self.room_bytes < 0:
            return "memory"
        if self._used.num_files > limits.max_files:
            return "files"
        if self._used.num_bytes + self._held.hidden_bytes > limits.disk_bytes:
            return "disk"
        return ""

    def close(self) -> None:
        """Let go of the processes, which are over."""
        self._surveyor.close()

    def _may_exceed(self, found: Survey) -> bool:
        limits, room, machine = self._limits, workspace.room(self._folder), _machine()
        num_sockets = self._held.num_sockets + max(0, machine.num_sockets - self._machine.num_sockets)
        kernel_bytes = machine.kernel_bytes - self._machine.kernel_bytes
        queue_bytes = _most_in_pipes(found.num_descriptors) + num_sockets * SOCKET_BYTES
        num_bytes = (
            self._used.num_bytes + self._held.hidden_bytes + self._room.num_bytes - room.num_bytes
        )
        num_files = self._used.num_files + self._room.num_files - room.num_files
        return (
            not self._tells_room
            or found.memory_bytes + queue_bytes > limits.memory_bytes
            or num_bytes > limits.disk_bytes
            or num_files > limits.max_files
            or self._held.num_mappings + kernel_bytes // _MAPPING_BYTES > limits.max_mappings
        )

    def _count(self) -> None:
        # Before what they are compared with: growth during the count is found by the next look.
        began_s = time.thread_time()
        self._room, self._machine = workspace.room(self._folder), _machine()
        self._held = processes.holdings(os.getpid(), self._limits.max_mappings)
        self._used = workspace.measure(self._folder, self._limits.max_files)
        pause_s = (time.thread_time() - began_s) / _COUNT_SHARE
        self._count_s = time.monotonic() + min(pause_s, _MAX_COUNT_S)


def _most_in_pipes(num_descriptors: int) -> int:
    """Bytes that pipes can hold: the kernel gives a user with many of them small ones."""
    many = _PIPE_PAGES * _PAGE_BYTES + num_descriptors * _SMALL_PIPE_BYTES if _PIPE_PAGES else 1 << 62
    return min(many, num_descriptors * PIPE_BYTES)


def _pipe_pages() -> int:
    """Pages in pipes from which on a user gets small ones; 0: no bound is known."""
    return int(processes.read("/proc/sys/fs/pipe-user-pages-soft") or b"0")


_PIPE_PAGES = _pipe_pages()


def _machine() -> Machine:
    """Use of this machine and network now; endless where the kernel does not tell."""
    sockets = processes.read("/proc/self/net/sockstat").partition(_SOCKETS)[2].split(None, 1)
    kernel = processes.read("/proc/meminfo").partition(_KERNEL_KIB)[2].split(None, 1)
    return Machine(
        int(sockets[0]) if sockets else next(_ENDLESS),
        1024 * int(kernel[0]) if kernel else next(_ENDLESS),
    )


_ENDLESS = itertools.count(1 << 40, 1 << 40)
