"""The cgroup that a zygote shares with its call, where the service makes some.

Invariants: the service sets the limits, and nothing in the group may change them; when the memory of
the group is used up, the kernel ends processes of the call and never the zygote, because those are the
first to go (`oom_score_adj`); the zygote is told at once and ends the rest.
"""

import os

from tailrace_sandbox.core.cgroups import values

_MOST_BYTES = 1 << 16
_NOT_HELD = ("file", "slab_reclaimable")  # the kernel takes these back before memory is used up


def enter(path: str) -> None:
    """Move this process into the group."""
    with open(f"{path}/cgroup.procs", "w") as processes:
        processes.write("0")


def held_bytes(path: str) -> int:
    """Memory of a group that the kernel cannot take back, without files."""
    with open(f"{path}/memory.current") as current, open(f"{path}/memory.stat") as stat:
        return _held_bytes(int(current.read()), stat.read())


def _held_bytes(current_bytes: int, stat: str) -> int:
    found = values(stat)
    return max(0, current_bytes - sum(found.get(name, 0) for name in _NOT_HELD))


class CallGroup:
    """Group of this process, before its first call."""

    def __init__(self, path: str) -> None:
        self.events = _open(f"{path}/memory.events")  # to poll for POLLPRI
        self._current = _open(f"{path}/memory.current")
        self._stat = _open(f"{path}/memory.stat")
        self._own_bytes = held_bytes(path)
        self._shortages = self._read_shortages()

    def begin(self) -> None:
        """Forget what happened to earlier calls."""
        self._shortages = self._read_shortages()

    def ran_out(self) -> bool:
        """Tell whether the kernel ended something of the call because the group's memory was used up.

        Ends for want of memory on the machine, or in a group around this one, are no fault of the call.
        """
        (shortages, ends), (shortages_before, ends_before) = self._read_shortages(), self._shortages
        return shortages > shortages_before and ends > ends_before

    def _read_shortages(self) -> tuple[int, int]:
        found = values(_read(self.events))  # which also makes the next event readable
        return found["oom"], found["oom_kill"]

    def call_bytes(self, enough_bytes: int) -> int:
        """Memory of the call without files; at most `enough_bytes` if some of it may be files."""
        current_bytes = int(_read(self._current))
        if current_bytes - self._own_bytes <= enough_bytes:
            return max(0, current_bytes - self._own_bytes)
        return max(0, _held_bytes(current_bytes, _read(self._stat)) - self._own_bytes)


def _open(path: str) -> int:
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _read(fd: int) -> str:
    return os.pread(fd, _MOST_BYTES, 0).decode()
