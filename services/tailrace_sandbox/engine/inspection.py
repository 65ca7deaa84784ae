"""Looks at everything that a call holds, at a cost that is small beside what the call does.

Each look reads memory and threads. The objects behind the descriptors, the mappings and the files of
the call are read one by one when the call could hold more than its limits by now, and as often as 0.4%
of a core allows: at each look for a few processes, every 4 s at least. It could if the pipes that its
user may have, and the sockets, kernel memory and disk blocks that are in more use on the machine since
the last time, were all its own.

Memory that forked processes share counts for each of them, since they can write to all of it between
two looks. What they hold together is measured at each count, and tells only how far the limit is. In a
cgroup the kernel counts memory instead, with that of pipes and sockets, and keeps the limit itself.
"""

import itertools
import os
import time
from typing import NamedTuple

from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import processes, workspace
from tailrace_sandbox.engine.group import CallGroup
from tailrace_sandbox.engine.processes import PIPE_BYTES, SOCKET_BYTES, Survey

_COUNT_SHARE, _MAX_COUNT_S = 0.004, 4.0  # of a core, for counts that nothing else demands
_PAGE_BYTES = 4096
_SMALL_PIPE_BYTES = 2 * _PAGE_BYTES  # of those of a user with too many
_MAPPING_BYTES = 160  # of kernel memory, at least
_SOCKETS, _KERNEL_KIB, _ANONYMOUS_KIB = b"sockets: used ", b"SUnreclaim:", b"AnonPages:"


class Machine(NamedTuple):
    """Things in use that the kernel counts for all processes together."""

    num_sockets: int
    kernel_bytes: int  # that it cannot reclaim, mappings among them
    anonymous_bytes: int  # of memory not backed by files; pages that processes share count once


class Inspection:
    """Of one call in `folder`. `tells_room`: the file system tells at once how much room is left."""

    def __init__(self, folder: str, limits: Limits, tells_room: bool, group: CallGroup | None) -> None:
        self._folder = folder
        self._limits = limits
        self._tells_room = tells_room
        self._group = group
        self._surveyor = processes.Surveyor(os.getpid(), limits)
        self._count_s = 0.0  # monotonic, of the next count in any case
        self._held = processes.Holdings(0, 0, 0, 0)
        self._used = workspace.Usage(0, 0)
        self._room = workspace.Room(0, 0)
        self._machine = Machine(0, 0, 0)
        self._distinct_bytes = 0  # of memory at the last count; what processes shared counts once
        self.room_bytes = 0  # of memory, after the last look, as far as is known

    def look(self) -> str:
        """Name of the broken limit; empty: none. Raises `UninspectableError` and `OSError`."""
        limits = self._limits
        # Before what they are compared with: growth during the look is found by the next one.
        room, machine = workspace.room(self._folder), _machine()
        found = self._surveyor.survey()
        if found.num_processes > limits.max_processes:
            return "processes"
        if time.monotonic() >= self._count_s or self._may_exceed(found, room, machine):
            began_s = time.thread_time()
            self._count(found, room, machine)
            pause_s = (time.thread_time() - began_s) / _COUNT_SHARE
            self._count_s = time.monotonic() + min(pause_s, _MAX_COUNT_S)
        if self._group is not None:
            memory_bytes = self._group.call_bytes(limits.memory_bytes)
            self.room_bytes = limits.memory_bytes - memory_bytes
        else:
            memory_bytes = found.memory_bytes + self._held.queue_bytes
            grown_bytes = max(0, machine.anonymous_bytes - self._machine.anonymous_bytes)
            own_bytes = min(found.memory_bytes, self._distinct_bytes + grown_bytes)
            self.room_bytes = limits.memory_bytes - own_bytes - self._held.queue_bytes
        return self._broken(memory_bytes)

    def _broken(self, memory_bytes: int) -> str:
        limits, held, used = self._limits, self._held, self._used
        if held.num_mappings > limits.max_mappings:
            return "mappings"
        if memory_bytes > limits.memory_bytes:
            return "memory"
        if used.num_files > limits.max_files:
            return "files"
        return "disk" if used.num_bytes + held.hidden_bytes > limits.disk_bytes else ""

    def close(self) -> None:
        """Let go of the processes, which are over."""
        self._surveyor.close()

    def _may_exceed(self, found: Survey, room: workspace.Room, machine: Machine) -> bool:
        limits = self._limits
        kernel_bytes = machine.kernel_bytes - self._machine.kernel_bytes
        num_bytes = (
            self._used.num_bytes + self._held.hidden_bytes + self._room.num_bytes - room.num_bytes
        )
        num_files = self._used.num_files + self._room.num_files - room.num_files
        return (
            not self._tells_room
            or num_bytes > limits.disk_bytes
            or num_files > limits.max_files
            or self._held.num_mappings + kernel_bytes // _MAPPING_BYTES > limits.max_mappings
            or (self._group is None and self._may_exceed_memory(found, machine))
        )

    def _may_exceed_memory(self, found: Survey, machine: Machine) -> bool:
        num_sockets = self._held.num_sockets + max(0, machine.num_sockets - self._machine.num_sockets)
        room_bytes = self._limits.memory_bytes - found.memory_bytes - num_sockets * SOCKET_BYTES
        most = found.num_processes * self._limits.max_open_files  # spares the look at each process
        return (
            _most_in_pipes(most) > room_bytes
            and _most_in_pipes(self._surveyor.num_descriptors()) > room_bytes
        )

    def _count(self, found: Survey, room: workspace.Room, machine: Machine) -> None:
        self._room, self._machine = room, machine
        self._held = self._surveyor.holdings()
        self._used = workspace.measure(self._folder, self._limits.max_files)
        self._distinct_bytes = found.memory_bytes
        if (
            self._group is None
            and found.num_processes > 1
            and found.memory_bytes <= self._limits.memory_bytes
        ):
            self._distinct_bytes = self._surveyor.distinct_bytes()


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
    sockets, memory = processes.read("/proc/self/net/sockstat"), processes.read("/proc/meminfo")
    return Machine(
        _number_after(_SOCKETS, sockets),
        1024 * _number_after(_KERNEL_KIB, memory),
        1024 * _number_after(_ANONYMOUS_KIB, memory),
    )


def _number_after(name: bytes, text: bytes) -> int:
    found = text.partition(name)[2].split(None, 1)
    return int(found[0]) if found else next(_ENDLESS)


_ENDLESS = itertools.count(1 << 40, 1 << 40)
