"""The one place where an unexpected exception is caught: it becomes a logged, counted, typed failure.

Everything a service runs (handlers, loops, hooks, spawned tasks) runs inside `Guard.run`. Expected
errors are caught by name long before; what arrives here is a bug or a broken world, and must not take
the rest of the service down.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tailrace import metrics
from tailrace.config import ConfigError
from tailrace.log import get_logger
from tailrace.runtime.signals import StopService

log = get_logger(__name__)

EXIT_FAILED = 1
EXIT_CONFIG = 2

T = TypeVar("T")
Stop = Callable[[str, int], None]


@dataclass(frozen=True)
class Failure:
    """An unexpected exception, after it was logged and counted."""

    where: str
    error_type: str
    reason: str


class Guard:
    """Runs work; `stop(reason, exit_code)` is told when the work says that the service must end."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    async def run(
        self, where: str, work: Awaitable[T], *, expected: tuple[type[Exception], ...] = ()
    ) -> T | Failure:
        """The work's result, or its failure; cancellation and `expected` exceptions pass through."""
        try:
            return await work
        except expected:
            raise
        except StopService as order:
            self._stop(order.reason, order.exit_code)
            return Failure(where, "StopService", order.reason)
        except ConfigError as error:
            self._stop(str(error), EXIT_CONFIG)
            return Failure(where, "ConfigError", str(error))
        except Exception as error:  # noqa: BLE001 - the one place
            return self.record(where, error)

    def record(self, where: str, error: BaseException) -> Failure:
        """Log and count an exception that was not expected."""
        kind = type(error).__name__
        metrics.FAILURES.labels(where, kind).inc()
        log.error("unexpected exception", where=where, error=kind, reason=str(error), exc_info=error)
        return Failure(where, kind, str(error) or kind)
