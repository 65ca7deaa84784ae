"""Looks at everything that a call holds, at a cost that is small beside what the call does.

Each look bounds the memory of the call: what it held at the last survey, plus all that the machine has
allocated since. A survey reads memory and threads of each process. It comes when the bound passes the
limit, and every 0.5 s, or with each look where nothing else limits processes.

The objects behind the descriptors, the mappings and the files of the call are counted one by one as
often as 0.4% of a core allows: at each look for a few processes, every 4 s at least. Each of the three
is counted at once when the call could hold more of it than its limit by now: if the memory that the
machine has allocated, and the kernel memory and disk blocks that are in more use since the last time,
were all its own.

Memory that forked processes share counts for each of them, since they can write to all of it between
two surveys. What they hold together is measured at each full count, and at once when it may be less
than half of that. It tells how far the limit is, and bounds the memory of the call likewise until
the next time. It ends when a survey in between finds too much, and it reads no large process near the
limit: the call would grow meanwhile. In a cgroup the kernel counts memory instead, with that of pipes
and sockets, and keeps the limit.

Of a deleted file that processes only map, nothing tells the size. While there is one, all blocks that
went from the disk count as the call's.
"""

import os
import time

from tailrace_sandbox.core.limits import MAX_WATCHED, Limits
from tailrace_sandbox.engine import processes, workspace
from tailrace_sandbox.engine.group import CallGroup
from tailrace_sandbox.engine.holdings import (
    PIPE_BYTES,
    SOCKET_BYTES,
    WATCH_BYTES,
    Hidden,
    Queues,
    read,
)
from tailrace_sandbox.engine.machine import PAGE_BYTES, Gauges, Machine

_COUNT_SHARE, _MAX_COUNT_S = 0.004, 4.0  # of a core, for counts that nothing else demands
_SURVEY_S = 0.5
_NEAR_LIMIT, _LARGE_BYTES = 0.75, 64 << 20  # share of the memory; of a process that takes 1 ms to read
_SMALL_PIPE_BYTES = 2 * PAGE_BYTES  # of those of a user with too many
_MAPPING_BYTES = 160  # of kernel memory, at least
_FILE_BYTES = 32768  # that can be written while a file is made


class Inspection:
    """Of one call in `folder`. `tells_room`: the file system tells at once how much room is left.

    `limits_processes`: something else keeps their limit exactly.
    """

    def __init__(
        self,
        folder: str,
        limits: Limits,
        gauges: Gauges,
        group: CallGroup | None,
        *,
        tells_room: bool,
        limits_processes: bool,
    ) -> None:
        self._folder = folder
        self._limits = limits
        self._gauges = gauges
        self._group = group
        self._tells_room = tells_room
        self._pause_s = _SURVEY_S if limits_processes else 0.0
        self._surveyor = processes.Surveyor(os.getpid(), limits)
        self._survey_s = self._count_s = 0.0  # monotonic, of the next ones in any case
        # Each with the state of machine or disk just before it.
        self._found, self._surveyed = processes.Survey(0, 0), Machine(0, 0, 0)
        self._most_bytes = 0  # of memory that the call could have at the last survey
        self._queues, self._queued = Queues(0, 0, 0), self._surveyed
        self._num_mappings, self._mapped = 0, self._surveyed
        self._used, self._room = workspace.Usage(0, 0), workspace.Room(0, 0)
        self._hidden_bytes = 0  # on disk, in files without a name
        # Room that a disk without the call would have, when it last held no file of unknown size.
        self._free_bytes = workspace.room(folder).num_bytes
        self._last_room = self._room  # of the last look
        self._distinct_bytes, self._measured = 0, self._surveyed  # what processes share counts once
        self._real_bytes = 0  # of memory that the call could have then, in this sense
        self.room_bytes = 0  # of memory and disk, after the last look, as far as is known

    def look(self) -> str:
        """Name of the broken limit; empty: none. Raises `UninspectableError` and `OSError`."""
        # Before what they are compared with: growth during the look is found by the next one.
        room, machine = workspace.room(self._folder), self._gauges.read()
        now_s = time.monotonic()
        is_full = now_s >= self._count_s or self._may_exceed_disk(room)
        may_split = self._may_exceed_mappings(machine)
        if is_full or may_split or now_s >= self._survey_s or self._may_exceed_memory(machine):
            self._survey_s = now_s  # should the survey or a count fail
            if broken := self._survey(machine):
                return broken
            if is_full or may_split:
                self._count(room, machine, is_full)
            self._bound_memory(machine)
            self._survey_s += self._pause_s
        broken = self._broken(self._memory(machine))
        self._note_writes(room)
        return broken

    def _survey(self, machine: Machine) -> str:
        """Survey the processes; returns the limit that they break without a further count."""
        limits = self._limits
        self._found, self._surveyed = self._surveyor.survey(), machine
        if self._found.num_processes > limits.max_processes:
            return "processes"
        is_too_large = self._group is None and self._found.memory_bytes > limits.memory_bytes
        return "memory" if is_too_large else ""

    def _memory(self, machine: Machine) -> int:
        """Memory that is known; puts the distance of the limit into `room_bytes`."""
        limits = self._limits
        if self._group is not None:
            memory_bytes = self._group.call_bytes(limits.memory_bytes)
            self.room_bytes = limits.memory_bytes - memory_bytes
            return memory_bytes
        self.room_bytes = limits.memory_bytes - self._most_memory(machine)
        return self._found.memory_bytes + self._queues.num_bytes

    def _note_writes(self, room: workspace.Room) -> None:
        """Put the distance of the limits of files into `room_bytes`, while somebody writes some."""
        last, self._last_room = self._last_room, room
        if room.num_bytes < last.num_bytes or room.num_files < last.num_files:
            used, limits = self._used, self._limits
            num_bytes = used.num_bytes + self._hidden_bytes + self._room.num_bytes - room.num_bytes
            num_files = used.num_files + self._room.num_files - room.num_files
            left = limits.disk_bytes - num_bytes, (limits.max_files - num_files) * _FILE_BYTES
            self.room_bytes = min(self.room_bytes, *left)

    def _broken(self, memory_bytes: int) -> str:
        limits, used = self._limits, self._used
        if self._num_mappings > limits.max_mappings:
            return "mappings"
        if self._queues.num_watched > MAX_WATCHED:
            return "watches"
        if memory_bytes > limits.memory_bytes:
            return "memory"
        if used.num_files > limits.max_files:
            return "files"
        return "disk" if used.num_bytes + self._hidden_bytes > limits.disk_bytes else ""

    def close(self) -> None:
        """Let go of the processes, which are over."""
        self._surveyor.close()

    def _may_exceed_disk(self, room: workspace.Room) -> bool:
        used_bytes = self._used.num_bytes + self._hidden_bytes
        return (
            not self._tells_room
            or used_bytes + self._room.num_bytes - room.num_bytes > self._limits.disk_bytes
            or self._used.num_files + self._room.num_files - room.num_files > self._limits.max_files
        )

    def _may_exceed_mappings(self, machine: Machine) -> bool:
        kernel_bytes = machine.kernel_bytes - self._mapped.kernel_bytes
        return self._num_mappings + kernel_bytes // _MAPPING_BYTES > self._limits.max_mappings

    def _may_exceed_memory(self, machine: Machine) -> bool:
        return self._group is None and self._most_memory(machine) > self._limits.memory_bytes

    def _most_memory(self, machine: Machine) -> int:
        """Bytes that the call can have by now: the lesser bound of survey and shared memory."""
        surveyed_bytes = self._most_bytes - self._surveyed.allocated_bytes
        measured_bytes = self._real_bytes - self._measured.allocated_bytes
        return machine.allocated_bytes + min(surveyed_bytes, measured_bytes)

    def _bound_memory(self, machine: Machine) -> None:
        """Set the bounds of memory after a survey, by counts if they pass the limit without."""
        in_queues_bytes = self._most_in_queues(machine)
        self._most_bytes = self._found.memory_bytes + in_queues_bytes
        if self._may_exceed_memory(machine) and 2 * self._distinct_bytes < self._found.memory_bytes:
            self._measure_distinct(machine, in_queues_bytes)
        if self._may_exceed_memory(machine):
            self._count_queues(machine, Hidden(self._folder))
            self._most_bytes = self._found.memory_bytes + self._queues.num_bytes

    def _most_in_queues(self, machine: Machine) -> int:
        """Most memory that pipes and sockets can have just after a survey, without a look at each."""
        queues = self._queues
        most_bytes = queues.num_bytes + machine.allocated_bytes - self._queued.allocated_bytes
        if self._found.memory_bytes + most_bytes <= self._limits.memory_bytes:
            return most_bytes
        num_sockets = queues.num_sockets + max(0, machine.num_sockets - self._queued.num_sockets)
        in_pipes_bytes = _most_in_pipes(self._surveyor.num_descriptors())
        kernel_bytes = max(0, machine.kernel_bytes - self._queued.kernel_bytes)
        watch_bytes = queues.num_watched * WATCH_BYTES + kernel_bytes
        return min(most_bytes, num_sockets * SOCKET_BYTES + in_pipes_bytes + watch_bytes)

    def _count(self, room: workspace.Room, machine: Machine, is_full: bool) -> None:
        """Count mappings and, if `is_full`, everything."""
        began_s = time.thread_time()
        hidden = Hidden(self._folder)
        self._num_mappings, self._mapped = self._surveyor.num_mappings(hidden), machine
        if is_full and self._num_mappings <= self._limits.max_mappings:
            self._count_queues(machine, hidden)
            self._used, self._room = workspace.measure(self._folder, self._limits.max_files), room
            self._count_hidden(hidden, room)
            self._measure_distinct(machine, self._queues.num_bytes)
            pause_s = (time.thread_time() - began_s) / _COUNT_SHARE
            self._count_s = time.monotonic() + min(pause_s, _MAX_COUNT_S)

    def _count_hidden(self, hidden: Hidden, room: workspace.Room) -> None:
        self._hidden_bytes = hidden.num_bytes
        if hidden.is_larger and self._tells_room:
            most_bytes = self._free_bytes - room.num_bytes - self._used.num_bytes
            self._hidden_bytes = max(self._hidden_bytes, most_bytes)
        else:
            self._free_bytes = room.num_bytes + self._used.num_bytes + self._hidden_bytes

    def _count_queues(self, machine: Machine, hidden: Hidden) -> None:
        self._queues, self._queued = self._surveyor.queues(hidden), machine

    def _measure_distinct(self, machine: Machine, in_queues_bytes: int) -> None:
        """Measure what the processes hold together.

        It bounds their memory if no process was forked meanwhile: one that came and ended unseen made
        the shares of others smaller.
        """
        found, forked = self._found, self._gauges.last_process()
        is_near = found.memory_bytes > _NEAR_LIMIT * self._limits.memory_bytes
        if is_near and self._surveyor.largest_bytes() > _LARGE_BYTES:
            return
        real_bytes = self._distinct_bytes = found.memory_bytes
        if self._group is None and found.num_processes > 1:
            self._surveyor.survey()
            self._distinct_bytes = self._surveyor.distinct_bytes()
            if self._gauges.last_process() == forked:
                real_bytes = self._distinct_bytes
        self._real_bytes, self._measured = real_bytes + in_queues_bytes, machine


def _most_in_pipes(num_descriptors: int) -> int:
    """Bytes that pipes can hold: the kernel gives a user with many of them small ones."""
    many = _PIPE_PAGES * PAGE_BYTES + num_descriptors * _SMALL_PIPE_BYTES if _PIPE_PAGES else 1 << 62
    return min(many, num_descriptors * PIPE_BYTES)


def _pipe_pages() -> int:
    """Pages in pipes from which on a user gets small ones; 0: no bound is known."""
    return int(read("/proc/sys/fs/pipe-user-pages-soft") or b"0")


_PIPE_PAGES = _pipe_pages()
