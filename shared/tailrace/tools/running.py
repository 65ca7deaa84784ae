"""One call of a tool's own code: bounded in time, whatever it does.

Invariants: the caller goes on at its timeout or cancellation even if the code ignores both; what goes
on after that is counted as abandoned until it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.sdk.tool import FunctionTool
from tailrace.tools import metrics
from tailrace.tools.threads import Threads

CANCEL_GRACE_S = 0.5  # for `finally` blocks of cancelled async tools


class ToolTimeoutError(Exception):
    """The tool's own code did not end in time. Attribute: `timeout_s`."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__(f"no answer within {timeout_s:g} s")
        self.timeout_s = timeout_s


class Runner:
    """Runs the code of tools."""

    def __init__(self) -> None:
        self._threads = Threads()
        self._stuck: set[asyncio.Task[Any]] = set()

    @property
    def num_abandoned(self) -> int:
        """Calls given up whose code still runs."""
        return self._threads.num_abandoned + len(self._stuck)

    async def call_function(self, tool: FunctionTool, kwargs: dict[str, Any], timeout_s: float) -> Any:
        """What the function returns; raises `ForeignCodeError`, `ToolTimeoutError`."""
        where = tool.spec.name
        if tool.is_async:
            return await self.call(where, lambda: tool.function(**kwargs), timeout_s)
        in_thread = self._threads.run(where, lambda: tool.function(**kwargs))
        return await self._bounded(in_thread, timeout_s)

    async def call(self, where: str, code: Callable[[], Awaitable[Any]], timeout_s: float) -> Any:
        """What async code returns; raises `ForeignCodeError`, `ToolTimeoutError`."""
        return await self._bounded(_foreign(where, code), timeout_s)

    async def _bounded(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        except asyncio.CancelledError:
            self._give_up(task)
            raise
        if task.done():
            return task.result()
        self._give_up(task)
        await asyncio.wait({task}, timeout=CANCEL_GRACE_S)
        raise ToolTimeoutError(timeout_s)

    def _give_up(self, task: asyncio.Task[Any]) -> None:
        task.cancel()
        self._stuck.add(task)
        metrics.ABANDONED.inc()
        task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self._stuck.discard(task)
        metrics.ABANDONED.dec()
        if not task.cancelled():
            task.exception()  # nobody is left to hear it


async def _foreign(where: str, code: Callable[[], Awaitable[Any]]) -> Any:
    try:
        with foreign_code(where):
            return await code()
    except SystemExit as error:
        raise ForeignCodeError(where, RuntimeError(f"sys.exit({error.code!r})")) from error
