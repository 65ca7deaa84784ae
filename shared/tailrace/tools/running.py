"""Execution of a tool's code: with a time limit, and in a thread for functions that block.

Invariants: the caller continues at its timeout or cancellation even if the code ignores both; code that
continues is counted as abandoned until it ends; the outcome of a function is delivered exactly once; a
thread of an abandoned function (Python cannot stop it) is reused after the function returns. Threads do
not delay the end of the process.
"""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import TracebackType
from typing import Any

from tailrace.foreign import ForeignCodeError, foreign_call, told
from tailrace.sdk.tool import FunctionTool
from tailrace.tools import metrics

_IDLE_S = 30.0
CANCEL_GRACE_S = 0.5  # for `finally` blocks of cancelled async tools


class Threads:
    """Threads for functions that block; as many as run at once. Limit the number of callers."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._num_idle = 0
        self._lock = threading.Lock()
        self.num_abandoned = 0

    async def run(self, where: str, function: Callable[[], Any]) -> Any:
        """Returns the value of the function; `ForeignCodeError` when it raises."""
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

    def _submit(self, job: "_Job") -> None:
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
                    if self._num_idle == 0:  # a job counts on this thread
                        continue
                    self._num_idle -= 1
                    return
            job.run()
            del job
            with self._lock:
                self._num_idle += 1

    def _on_end(self, job: "_Job") -> None:
        """Runs in the event loop after the function has returned."""
        job.has_ended = True
        if job.is_abandoned:
            self.num_abandoned -= 1
            metrics.ABANDONED.dec()


class _Job:
    """One function for a thread."""

    def __init__(
        self,
        where: str,
        function: Callable[[], Any],
        loop: asyncio.AbstractEventLoop,
        outcome: asyncio.Future[Any],
        on_end: "Callable[[_Job], None]",
    ) -> None:
        self.outcome = outcome
        self.is_abandoned = False
        self.has_ended = False
        self._where = where
        self._function = function
        self._loop = loop
        self._on_end = on_end

    def run(self) -> None:
        """Runs in the thread."""
        ended_thread = ForeignCodeError(self._where, RuntimeError("it ended its thread"))
        value: Any = None
        error: ForeignCodeError | None = ended_thread
        try:
            with _tool_code(self._where):
                value = self._function()
            error = None
        except ForeignCodeError as raised:
            error = raised
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no caller waits
                self._loop.call_soon_threadsafe(self._deliver, value, error)

    def _deliver(self, value: Any, error: ForeignCodeError | None) -> None:
        self._on_end(self)
        if self.outcome.done():
            return
        if error is None:
            self.outcome.set_result(value)
        else:
            self.outcome.set_exception(error)


class ToolTimeoutError(Exception):
    """The tool's code did not end within `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no answer within {timeout_s:g} s")
        self.timeout_s = timeout_s


class ToolRunner:
    """Runner of the code of tools."""

    def __init__(self) -> None:
        self._threads = Threads()
        self._stuck: set[asyncio.Task[Any]] = set()

    @property
    def num_abandoned(self) -> int:
        """Number of abandoned calls whose code still runs."""
        return self._threads.num_abandoned + len(self._stuck)

    async def call_function(self, tool: FunctionTool, kwargs: dict[str, Any], timeout_s: float) -> Any:
        """Returns the value of a function; raises `ForeignCodeError`, `ToolTimeoutError`."""
        where = tool.spec.name
        if tool.is_async:
            return await self.call(where, lambda: tool.function(**kwargs), timeout_s)
        in_thread = self._threads.run(where, lambda: tool.function(**kwargs))
        return await self._bounded(in_thread, timeout_s)

    async def call(self, where: str, code: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
        """Returns the value of async code; raises `ForeignCodeError`, `ToolTimeoutError`."""
        return await self._bounded(_foreign(where, code), timeout_s)

    async def _bounded(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        except asyncio.CancelledError:
            self._abandon(task)
            raise
        if task.done():
            return task.result()
        self._abandon(task)
        await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        raise ToolTimeoutError(timeout_s)

    def _abandon(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._stuck.add(task)
        metrics.ABANDONED.inc()
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._stuck.discard(task)
        metrics.ABANDONED.dec()
        if not task.cancelled():
            task.exception()  # no caller is left


async def _foreign(where: str, code: Callable[[], Awaitable[Any]]) -> Any:
    with _tool_code(where):
        return await code()


class _tool_code(foreign_call):  # noqa: N801  used like a statement
    """`foreign_call` that turns cancellations and the like of a tool's own too."""

    __slots__ = ()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        super().__exit__(kind, error, traceback)
        ours = isinstance(error, asyncio.CancelledError) and _is_abandoned()
        if error is not None and not ours and not isinstance(error, KeyboardInterrupt | GeneratorExit):
            raise ForeignCodeError(self._where, RuntimeError(told(error))) from error


def _is_abandoned() -> bool:
    """Tells whether the running task is cancelled; not so in a thread."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return False
    return task is not None and task.cancelling() > 0
