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
the next time. In a cgroup the kernel counts memory instead, with that of pipes and sockets, and keeps
the limit.
"""

import os
import time

from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import processes, workspace
from tailrace_sandbox.engine.group import CallGroup
from tailrace_sandbox.engine.machine import PAGE_BYTES, Gauges, Machine
from tailrace_sandbox.engine.processes import PIPE_BYTES, SOCKET_BYTES

_COUNT_SHARE, _MAX_COUNT_S = 0.004, 4.0  # of a core, for counts that nothing else demands
_SURVEY_S = 0.5
_SMALL_PIPE_BYTES = 2 * PAGE_BYTES  # of those of a user with too many
_MAPPING_BYTES = 160  # of kernel memory, at least


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
        self._found, self._surveyed = processes.Survey(0, 0), Machine(0, 0, 0, 0)
        self._most_bytes = 0  # of memory that the call could have at the last survey
        self._queues, self._queued = processes.Queues(0, 0), self._surveyed
        self._num_mappings, self._mapped = 0, self._surveyed
        self._used, self._room = workspace.Usage(0, 0), workspace.Room(0, 0)
        self._hidden_bytes = 0  # on disk, in files without a name
        self._distinct_bytes, self._measured = 0, self._surveyed  # what processes share counts once
        self._real_bytes = 0  # of memory that the call could have then, in this sense
        self.room_bytes = 0  # of memory, after the last look, as far as is known

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
        return self._broken(self._memory(machine))

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
        grown_bytes = max(0, machine.anonymous_bytes - self._measured.anonymous_bytes)
        own_bytes = min(
            self._found.memory_bytes + machine.allocated_bytes - self._surveyed.allocated_bytes,
            self._distinct_bytes + grown_bytes,
        )
        self.room_bytes = limits.memory_bytes - own_bytes - self._queues.num_bytes
        return self._found.memory_bytes + self._queues.num_bytes

    def _broken(self, memory_bytes: int) -> str:
        limits, used = self._limits, self._used
        if self._num_mappings > limits.max_mappings:
            return "mappings"
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
        """Tell whether both bounds pass the limit: the last survey's, and that of shared memory."""
        surveyed_bytes = self._most_bytes - self._surveyed.allocated_bytes
        measured_bytes = self._real_bytes - self._measured.allocated_bytes
        most_bytes = machine.allocated_bytes + min(surveyed_bytes, measured_bytes)
        return self._group is None and most_bytes > self._limits.memory_bytes

    def _bound_memory(self, machine: Machine) -> None:
        """Set the bounds of memory after a survey, by counts if they pass the limit without."""
        in_queues_bytes = self._most_in_queues(machine)
        self._most_bytes = self._found.memory_bytes + in_queues_bytes
        if self._may_exceed_memory(machine) and 2 * self._distinct_bytes < self._found.memory_bytes:
            self._measure_distinct(machine, in_queues_bytes)
        if self._may_exceed_memory(machine):
            self._count_queues(machine, {})
            self._most_bytes = self._found.memory_bytes + self._queues.num_bytes

    def _most_in_queues(self, machine: Machine) -> int:
        """Most memory that pipes and sockets can have just after a survey, without a look at each."""
        queues = self._queues
        most_bytes = queues.num_bytes + machine.allocated_bytes - self._queued.allocated_bytes
        if self._found.memory_bytes + most_bytes <= self._limits.memory_bytes:
            return most_bytes
        num_sockets = queues.num_sockets + max(0, machine.num_sockets - self._queued.num_sockets)
        in_pipes_bytes = _most_in_pipes(self._surveyor.num_descriptors())
        return min(most_bytes, num_sockets * SOCKET_BYTES + in_pipes_bytes)

    def _count(self, room: workspace.Room, machine: Machine, is_full: bool) -> None:
        """Count mappings and, if `is_full`, everything."""
        began_s = time.thread_time()
        hidden: dict[processes.Key, int] = {}
        self._num_mappings, self._mapped = self._surveyor.num_mappings(hidden), machine
        if is_full and self._num_mappings <= self._limits.max_mappings:
            self._count_queues(machine, hidden)
            self._used, self._room = workspace.measure(self._folder, self._limits.max_files), room
            self._hidden_bytes = sum(hidden.values())
            self._measure_distinct(machine, self._queues.num_bytes)
            pause_s = (time.thread_time() - began_s) / _COUNT_SHARE
            self._count_s = time.monotonic() + min(pause_s, _MAX_COUNT_S)

    def _count_queues(self, machine: Machine, hidden: dict[processes.Key, int]) -> None:
        self._queues, self._queued = self._surveyor.queues(hidden), machine

    def _measure_distinct(self, machine: Machine, in_queues_bytes: int) -> None:
        """Measure what the processes hold together.

        It bounds their memory if no process was forked meanwhile: one that came and ended unseen made
        the shares of others smaller.
        """
        found, forked = self._found, self._gauges.last_process()
        real_bytes = self._distinct_bytes = found.memory_bytes
        if (
            self._group is None
            and found.num_processes > 1
            and found.memory_bytes <= self._limits.memory_bytes
        ):
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
    return int(processes.read("/proc/sys/fs/pipe-user-pages-soft") or b"0")


_PIPE_PAGES = _pipe_pages()
