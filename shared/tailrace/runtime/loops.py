"""Long-running work inside a service: loops that are restarted, tasks that run once.

Invariants: no exception is lost; a loop that fails is restarted with back-off until the service
drains; nothing started here outlives the service.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TypeVar

from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.runtime.drain import cancel
from tailrace.runtime.guard import Failure, Guard

log = get_logger(__name__)

STEADY_S = 30.0  # a loop that ran so long starts its back-off anew

T = TypeVar("T")


class Tasks:
    """The tasks of one service."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._running: set[asyncio.Task[object]] = set()

    def spawn(self, work: Coroutine[object, object, T], name: str) -> asyncio.Task[T | Failure]:
        """Run once; the task's result is the work's, or a `Failure`."""
        task = asyncio.create_task(self._guard.run(f"task:{name}", work), name=name)
        self._keep(task)
        return task

    def loop(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        """Run until it returns; again whenever it fails."""
        self._keep(asyncio.create_task(self._supervise(name, body), name=name))

    async def end(self) -> None:
        """Cancel all and wait for them."""
        await cancel(self._running)

    def _keep(self, task: asyncio.Task[T]) -> None:
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _supervise(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        backoff = Backoff(0.2, 10.0)
        while True:
            started_s = loop.time()
            result = await self._guard.run(f"loop:{name}", body())
            if not isinstance(result, Failure):
                return
            if loop.time() - started_s > STEADY_S:
                backoff.reset()
            delay_s = backoff.next_s()
            log.warning("loop restarts", loop=name, delay_s=round(delay_s, 2))
            await asyncio.sleep(delay_s)
