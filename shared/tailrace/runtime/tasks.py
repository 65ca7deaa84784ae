"""Tasks of a service: loops that restart after a failure, tasks that run once, and their end.

Invariants: no exception is lost; a failed loop restarts with back-off until the service drains; no task
outlives the service. All actors drain with the same `hurry` event; it is set when the drain's time is
over or a second signal comes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.runtime.guard import Failure, Guard

log = get_logger(__name__)

CANCEL_TIMEOUT_S = 5.0
STEADY_S = 30.0  # after this run time a loop starts its back-off again

T = TypeVar("T")


async def finish(tasks: Iterable[asyncio.Task[Any]], hurry: asyncio.Event) -> None:
    """Waits until `tasks` are done or `hurry` is set, then cancels the rest."""
    pending = {task for task in tasks if not task.done()}
    if pending:
        all_done = asyncio.create_task(asyncio.wait(pending))
        hurrying = asyncio.create_task(hurry.wait())
        await asyncio.wait({all_done, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        all_done.cancel()
        hurrying.cancel()
        await cancel(task for task in pending if not task.done())


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancels tasks and waits for them; logs a task that ignores the cancellation."""
    pending = set(tasks)
    for task in pending:
        task.cancel()
    if pending:
        _, stuck = await asyncio.wait(pending, timeout=CANCEL_TIMEOUT_S)
        for task in stuck:
            log.error("task ignores cancellation", task=task.get_name())


class Tasks:
    """Tasks of one service."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._running: set[asyncio.Task[object]] = set()

    def spawn(self, work: Coroutine[object, object, T], name: str) -> asyncio.Task[T | Failure]:
        """Runs the work once; the task's result is the work's result or a `Failure`."""
        task = asyncio.create_task(self._guard.run(f"task:{name}", work), name=name)
        self._keep(task)
        return task

    def loop(self, name: str, body: Callable[[], Awaitable[None]]) -> None:
        """Runs `body` until it returns; restarts it after each failure."""
        self._keep(asyncio.create_task(self._supervise(name, body), name=name))

    async def end(self) -> None:
        """Cancels all tasks and waits for them."""
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
