"""Threads for functions that block: reused, as many as run at once, never in the way of an exit.

Invariants: a function's outcome is delivered exactly once, whatever it raises; a thread whose caller
gave up is abandoned (Python cannot stop it), counted until its function returns, and then reused.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.tools import metrics

_IDLE_S = 30.0


class Threads:
    """Runs functions outside the event loop. Bound the number of callers, not this."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._num_idle = 0
        self._lock = threading.Lock()
        self.num_abandoned = 0

    async def run(self, where: str, function: Callable[[], Any]) -> Any:
        """What the function returns; `ForeignCodeError` for what it raises."""
        loop = asyncio.get_running_loop()
        job = _Job(where, function, loop, loop.create_future(), self._on_end)
        self._submit(job)
        try:
            return await job.outcome
        except asyncio.CancelledError:
            job.is_abandoned = True
            if not job.has_ended:
                self.num_abandoned += 1
                metrics.ABANDONED.inc()
            raise

    def _submit(self, job: _Job) -> None:
        with self._lock:
            is_idle = self._num_idle > 0
            self._num_idle -= is_idle
        self._jobs.put(job)
        if not is_idle:
            threading.Thread(target=self._work, name="tool", daemon=True).start()

    def _work(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._num_idle == 0:  # somebody counts on this thread
                        continue
                    self._num_idle -= 1
                    return
            job.run()
            del job
            with self._lock:
                self._num_idle += 1

    def _on_end(self, job: _Job) -> None:
        """In the event loop, once the function has returned."""
        job.has_ended = True
        if job.is_abandoned:
            self.num_abandoned -= 1
            metrics.ABANDONED.dec()


class _Job:
    """One function on its way through a thread."""

    def __init__(
        self,
        where: str,
        function: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        outcome: asyncio.Future[Any],
        on_end: Callable[[_Job], None],
    ) -> None:
        self.outcome = outcome
        self.is_abandoned = False
        self.has_ended = False
        self._where = where
        self._function = function
        self._loop = loop
        self._on_end = on_end

    def run(self) -> None:
        """In the thread."""
        ended_thread = ForeignCodeError(self._where, RuntimeError("it ended its thread"))
        value: Any = None
        error: ForeignCodeError | None = ended_thread
        try:
            with foreign_code(self._where):
                value = self._function()
            error = None
        except ForeignCodeError as raised:
            error = raised
        except SystemExit as raised:
            error = ForeignCodeError(self._where, RuntimeError(f"sys.exit({raised.code!r})"))
        finally:
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile: nobody waits
                self._loop.call_soon_threadsafe(self._deliver, value, error)

    def _deliver(self, value: Any, error: ForeignCodeError | None) -> None:
        self._on_end(self)
        if self.outcome.done():
            return
        if error is None:
            self.outcome.set_result(value)
        else:
            self.outcome.set_exception(error)
