"""Guard: turns an unexpected exception into a logged, counted and typed failure.

All code of a service (handlers, loops, hooks, spawned tasks) runs inside `Guard.run`. Other code
catches expected errors by name. An exception that reaches the guard is a bug or a broken environment;
it must not stop the rest of the service. This is the only broad `except` of the code base.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from tailrace import metrics
from tailrace.config import ConfigError
from tailrace.log import get_logger

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
        """Returns the work's result or its failure; raises cancellation and `expected` exceptions."""
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
        except Exception as error:  # noqa: BLE001 - the only broad except
            return self.record(where, error)

    def record(self, where: str, error: BaseException) -> Failure:
        """Logs and counts an unexpected exception."""
        kind = type(error).__name__
        metrics.FAILURES.labels(where, kind).inc()
        log.error("unexpected exception", where=where, error=kind, reason=str(error), exc_info=error)
        return Failure(where, kind, str(error) or kind)
