"""One call while it runs: its limits against the clock, and against what its processes hold."""

import os
import signal
import time
from dataclasses import dataclass, field

from tailrace_sandbox.engine import processes
from tailrace_sandbox.engine.inspection import Inspection
from tailrace_sandbox.engine.workspace import UninspectableError

_FIRST_LOOK_S = 0.01
_LAST_LOOK_S = 0.1
_LOOKS_SHARE = 0.004  # of a core goes into looks; with counts and the rest it is less than 0.02
_NEAR_SHARE = 0.018  # likewise, where a limit could be passed within `_FIRST_LOOK_S`
_FASTEST_BYTES_S = 4 << 30  # of growing memory: a limit that is near is looked at more often
_PAUSED_LOOK_S = 1.0
_MAX_BLIND_LOOKS = 2  # a process that just ends or starts a program cannot be looked at either
_MAX_RESTLESS_LOOKS = 3
INTERRUPT_GRACE_S = 1.0
_MAX_GRACES = 5  # while the interrupt has not been received


@dataclass
class ForkedCall:
    """The processes of a call. `deadline_s`: monotonic; None while a session waits for code."""

    pid: int  # of its first process, and its process group
    inspection: Inspection
    is_session: bool
    deadline_s: float | None
    look_s: float = field(default_factory=lambda: time.monotonic() + _FIRST_LOOK_S)
    was_interrupted: bool = False
    num_graces: int = 0
    is_paused: bool = False
    num_blind_looks: int = 0  # one after the other
    num_restless_looks: int = 0  # one after the other, that found that a paused call had run
    awake: dict[str, int | None] = field(default_factory=dict)  # of the last look at a paused call

    def next_event_s(self) -> float:
        """Seconds until the next inspection; negative: wait for messages alone."""
        times_s = [self.deadline_s] if self.deadline_s is not None else []
        if times_s or self.is_paused:
            times_s.append(self.look_s)
        return max(0.0, min(times_s) - time.monotonic()) if times_s else -1.0

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
            if not self._interrupt():
                return "wall_clock"
            self.deadline_s = now_s + INTERRUPT_GRACE_S
        if now_s < self.look_s:
            return ""
        if self.is_paused:
            self.look_s = now_s + _PAUSED_LOOK_S
            return self._look_for_life()
        began_s = time.thread_time()
        self.look_s = now_s + _LAST_LOOK_S  # `_look` may bring it forward
        reason = self._look()
        cost_s = (time.thread_time() - began_s) / _LOOKS_SHARE
        self.look_s = min(self.look_s, now_s + max(_FIRST_LOOK_S, cost_s))
        return reason

    def _interrupt(self) -> bool:
        """Interrupt a session that is out of time; false where it has had its time to end since.

        That begins when it receives the interrupt: a busy machine may give it no processor before.
        """
        if not self.is_session:
            return False
        if not self.was_interrupted:
            self.was_interrupted, self.num_graces = True, 0
            os.kill(self.pid, signal.SIGINT)
            return True
        self.num_graces += 1
        is_starved = processes.has_yet_to_receive(self.pid, signal.SIGINT)
        return is_starved and self.num_graces < _MAX_GRACES

    def _look_for_life(self) -> str:
        """Stop a paused call again if anything in it is awake; one that runs and does not stop ends.

        A thread stops when it gets a processor, which a busy machine may give it much later.
        """
        before, self.awake = self.awake, processes.awake(os.getpid())
        if not self.awake:
            self.num_restless_looks = 0
            return ""
        has_run = (run_ns is None or run_ns != before.get(it) for it, run_ns in self.awake.items())
        self.num_restless_looks += any(has_run)
        self.look_s = time.monotonic() + _FIRST_LOOK_S
        processes.send(self.pid, signal.SIGSTOP)
        return "restless" if self.num_restless_looks > _MAX_RESTLESS_LOOKS else ""

    def _look(self) -> str:
        began_s, before_s = time.monotonic(), time.thread_time()  # growth during the look counts
        try:
            reason = self.inspection.look()
            self.num_blind_looks = 0
        except (UninspectableError, OSError):
            self.num_blind_looks += 1
            self.look_s = time.monotonic() + _FIRST_LOOK_S
            return "uninspectable" if self.num_blind_looks > _MAX_BLIND_LOOKS else ""
        rest_s = min(_FIRST_LOOK_S, (time.thread_time() - before_s) / _NEAR_SHARE)
        soon_s = max(rest_s, self.inspection.room_bytes / _FASTEST_BYTES_S)
        self.look_s = min(self.look_s, began_s + soon_s)
        return reason

    def resume(self, wall_s: float) -> None:
        """Let a session run until it pauses or `wall_s` seconds are over."""
        self.was_interrupted = self.is_paused = False
        self.deadline_s = time.monotonic() + wall_s
        self.look_s = time.monotonic() + _FIRST_LOOK_S
        processes.send(self.pid, signal.SIGCONT)

    def pause(self) -> None:
        """Stop a session's processes, whatever they are doing; looks make sure that they are."""
        processes.send(self.pid, signal.SIGSTOP)
        self.deadline_s = None
        self.is_paused = True
        self.num_restless_looks, self.awake = 0, {}
        self.look_s = time.monotonic() + _FIRST_LOOK_S

    def end(self) -> int:
        """Kill what is left; the exit code of the first process, negative for a signal."""
        self.inspection.close()
        return os.waitstatus_to_exitcode(processes.end(self.pid))
