"""Thread that detects code which blocks the event loop, and frees the loop or ends the process.

Code that computes for ever in the event loop stops all messages of a process, its heartbeats and its
timeouts, so only another thread can detect it. The watchdog logs the blocking code. It raises
`LoopBlockedError` in code that it may interrupt. If nothing helps, it ends the process with
`EXIT_BLOCKED`; the supervisor (locally, or the kubelet) starts a new one.

Invariant: a loop without a processor is not blocked: the time that its thread waits for one does not
count.
"""

import asyncio
import ctypes
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from types import CodeType, FrameType

from tailrace.log import get_logger

log = get_logger(__name__)

EXIT_BLOCKED = 70
_NUM_POLLS = 8  # within the limit
_NUM_LIMITS = 4  # limits after which the process ends
_NUM_LINES = 12


class LoopBlockedError(BaseException):
    """Raised in code that holds the event loop. No `Exception`: user code must not swallow it."""


class LoopWatchdog:
    """Watches one event loop; with `max_blocked_s` 0 it does nothing.

    It logs after `max_blocked_s` and ends the process after four times as long. `interruptible` are
    functions below which code may be interrupted; `advice` is for the log.
    """

    def __init__(
        self, max_blocked_s: float, interruptible: tuple[CodeType, ...] = (), advice: str = ""
    ) -> None:
        self._max_blocked_s = max_blocked_s
        self._interruptible = interruptible
        self._advice = advice
        self._poll_s = max_blocked_s / _NUM_POLLS
        self._num_ticks = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread = 0
        self._clock = _ThreadClock()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Watch the running loop from now on."""
        if not self._max_blocked_s:
            return
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._clock = _ThreadClock()
        self._tick()
        threading.Thread(target=self._watch, name="loop watchdog", daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def _tick(self) -> None:
        self._num_ticks += 1
        if self._loop is not None and not self._stopped.is_set():
            self._loop.call_later(self._poll_s / 2, self._tick)

    def _watch(self) -> None:
        """Count the time without a tick."""
        seen, blocked_s, next_alarm_s = self._num_ticks, 0.0, self._max_blocked_s
        while not self._stopped.wait(self._poll_s):
            held_s = min(self._clock.held_s(), 2 * self._poll_s)  # all of us may have been suspended
            if seen != self._num_ticks:
                seen, blocked_s, next_alarm_s = self._num_ticks, 0.0, self._max_blocked_s
                continue
            blocked_s += held_s
            if blocked_s >= next_alarm_s:
                next_alarm_s += self._max_blocked_s
                self._alarm(blocked_s)

    def _alarm(self, blocked_s: float) -> None:
        num_ticks, frame = self._num_ticks, sys._current_frames().get(self._loop_thread)
        where = "".join(traceback.format_stack(frame)[-_NUM_LINES:])
        log.error("event loop blocked", blocked_s=round(blocked_s, 1), advice=self._advice, where=where)
        if blocked_s >= _NUM_LIMITS * self._max_blocked_s:
            log.critical("event loop stays blocked: the process ends", blocked_s=round(blocked_s, 1))
            os._exit(EXIT_BLOCKED)
        now = sys._current_frames().get(self._loop_thread)  # the code may have ended since
        if num_ticks == self._num_ticks and self._is_interruptible(now):
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self._loop_thread), ctypes.py_object(LoopBlockedError)
            )

    def _is_interruptible(self, frame: FrameType | None) -> bool:
        while frame is not None:
            if frame.f_code in self._interruptible:
                return True
            frame = frame.f_back
        return False


class _ThreadClock:
    """Time that its thread has run or slept since the last question, without waits for a processor."""

    def __init__(self) -> None:
        self._schedstat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        self._last_s = self._now_s()

    def held_s(self) -> float:
        """The time that passed, without what it spent waiting for a processor (known on Linux)."""
        before_s, self._last_s = self._last_s, self._now_s()
        return self._last_s - before_s

    def _now_s(self) -> float:
        waited_ns = 0
        if self._schedstat.exists():
            waited_ns = int(self._schedstat.read_text().split()[1])
        return time.monotonic() - waited_ns * 1e-9
