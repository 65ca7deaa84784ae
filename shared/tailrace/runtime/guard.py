"""Guard: turns an unexpected exception into a logged, counted and typed failure.

All code of a service (handlers, loops, hooks, spawned tasks) runs inside `Guard.run`. Other code
catches expected errors by name. An exception that reaches the guard is a bug or a broken environment;
it must not stop the rest of the service. This is the only broad `except` of the code base.

`Tasks` runs loops, which restart with back-off after a failure, and tasks that run once; none outlives
the service. All actors drain with the same `hurry` event; it is set when the drain's time is over or a
second signal comes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from tailrace import metrics
from tailrace.config import ConfigError
from tailrace.log import get_logger
from tailrace.retry import Backoff

log = get_logger(__name__)

EXIT_FAILED = 1
EXIT_CONFIG = 2
Stop = Callable[[str, int], None]

T = TypeVar("T")


class HandBack(Exception):  # noqa: N818 - no error: another worker takes the message
    """Returns a pulled message to its queue, for redelivery to any worker after `delay_s`.

    It does not count as a failure towards a dead letter.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        super().__init__(f"handed back for {delay_s:g} s")
        self.delay_s = delay_s


class LeftToAnother(Exception):  # noqa: N818 - no error: another worker settles the message
    """Leaves a pulled message unsettled: it was redelivered, and another worker has it now."""


class StopService(Exception):  # noqa: N818 - a command, raised where the service cannot continue
    """Ends this service: drains it, then exits with `exit_code`."""

    def __init__(self, exit_code: int, reason: str) -> None:
        super().__init__(reason)
        self.exit_code = exit_code
        self.reason = reason


@dataclass(frozen=True)
class Failure:
    """Unexpected exception that was logged and counted."""

    where: str
    error_type: str
    reason: str


class Guard:
    """Runs work; calls `stop(reason, exit_code)` when the work demands the end of the service."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    async def run(
        self, where: str, work: Awaitable[T], *, expected: tuple[type[Exception], ...] = ()
    ) -> T | Failure:
        """Returns the work's result or its failure; raises `expected` exceptions and cancellation.

        A `CancelledError` of work that nobody cancelled (it awaits a cancelled task) is a failure too.
        """
        try:
            return await work
        except expected:
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return self.record(where, error)
        except StopService as order:
            self._stop(order.reason, order.exit_code)
            return Failure(where, "StopService", order.reason)
        except ConfigError as error:
            self._stop(str(error), EXIT_CONFIG)
            return Failure(where, "ConfigError", str(error))
        except Exception as error:  # noqa: BLE001 - the only broad except
            return self.record(where, error)

    def record(self, where: str, error: BaseException) -> Failure:
        """Logs and counts an unexpected exception; of a task group's only one, the exception itself."""
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        kind = type(error).__name__
        metrics.FAILURES.labels(where, kind).inc()
        log.error("unexpected exception", where=where, error=kind, reason=str(error), exc_info=error)
        return Failure(where, kind, str(error) or kind)


CANCEL_TIMEOUT_S = 5.0
STEADY_S = 30.0  # after this run time a loop starts its back-off again


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
