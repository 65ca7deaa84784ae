"""One call while it runs: its limits against the clock, and against what its processes hold."""

import os
import signal
import time
from dataclasses import dataclass, field

from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import processes, workspace
from tailrace_sandbox.engine.workspace import UninspectableError

_FIRST_LOOK_S = 0.01
_LOOKS_SHARE = 0.1  # of a core, at most, goes into looking
_MAX_BLIND_LOOKS = 2  # a process that just ends or starts a program cannot be looked at either
INTERRUPT_GRACE_S = 1.0


@dataclass
class ForkedCall:
    """The processes of a call. `deadline_s`: monotonic; None while a session waits for code."""

    pid: int  # of its first process, and its process group
    folder: str
    limits: Limits
    is_session: bool
    deadline_s: float | None
    look_s: float = field(default_factory=lambda: time.monotonic() + _FIRST_LOOK_S)
    was_interrupted: bool = False
    num_blind_looks: int = 0  # one after the other

    def next_event_s(self) -> float:
        """Seconds until the next inspection; negative: wait for messages alone."""
        if self.deadline_s is None:
            return -1.0
        return max(0.0, min(self.deadline_s, self.look_s) - time.monotonic())

    def has_ended(self) -> bool:
        """Tell whether the first process has exited; reaps orphans that ended."""
        while found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if found.si_pid == self.pid:
                return True
            os.waitpid(found.si_pid, 0)
        return False

    def breach(self) -> str:
        """Name of the broken limit; empty: none. A session out of time is interrupted first."""
        now_s = time.monotonic()
        if self.deadline_s is not None and now_s >= self.deadline_s:
            if not self.is_session or self.was_interrupted:
                return "wall_clock"
            self.was_interrupted = True
            self.deadline_s = now_s + INTERRUPT_GRACE_S
            os.kill(self.pid, signal.SIGINT)
        if now_s < self.look_s:
            return ""
        reason = self._look()
        took_s = time.monotonic() - now_s
        self.look_s = now_s + max(_FIRST_LOOK_S, took_s / _LOOKS_SHARE)
        return reason

    def _look(self) -> str:
        limits = self.limits
        try:
            held = processes.footprint(os.getpid(), limits.max_processes)
            used = workspace.measure(self.folder, limits.max_files)
            self.num_blind_looks = 0
        except UninspectableError:
            self.num_blind_looks += 1
            return "uninspectable" if self.num_blind_looks > _MAX_BLIND_LOOKS else ""
        if held.num_processes > limits.max_processes:
            return "processes"
        if held.memory_bytes > limits.memory_bytes:
            return "memory"
        if used.num_files > limits.max_files:
            return "files"
        if used.num_bytes + held.hidden_bytes > limits.disk_bytes:
            return "disk"
        return ""

    def resume(self, wall_s: float) -> None:
        """Let a session run until it pauses or `wall_s` seconds are over."""
        self.was_interrupted = False
        self.deadline_s = time.monotonic() + wall_s
        self.look_s = time.monotonic() + _FIRST_LOOK_S
        processes.send(self.pid, signal.SIGCONT)

    def pause(self) -> None:
        """Stop a session's processes, whatever they are doing."""
        processes.send(self.pid, signal.SIGSTOP)
        self.deadline_s = None

    def end(self) -> int:
        """Kill what is left; the exit code of the first process, negative for a signal."""
        return os.waitstatus_to_exitcode(processes.end(self.pid))
