"""Time as a dependency: code that waits or stores times takes a `Clock`, so that tests control time."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for stored times, monotonic time for durations, and sleep."""

    def unix_s(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Returns after `delay_s` of this clock's time."""
        ...


class SystemClock:
    """Time of the machine."""

    unix_s = staticmethod(time.time)
    monotonic_s = staticmethod(time.monotonic)

    async def sleep(self, delay_s: float) -> None:
        """Returns after `delay_s`."""
        await asyncio.sleep(delay_s)


MAX_GAP_S = 1.0


class SteadyClock:
    """Time of the machine until `begin`; then its unix time neither jumps nor counts pauses.

    Somebody may set the machine's clock, or suspend the machine or this process. A process that judges
    others by their silence must not count that time, in which it heard nobody: between two calls of
    `unix_s` at most `MAX_GAP_S` pass.
    """

    def __init__(self, machine: Clock | None = None) -> None:
        self._machine = machine or SystemClock()
        self._unix_s: float | None = None
        self._asked_s = 0.0

    def begin(self) -> None:
        """Starts at the machine's time. From now on `unix_s` must be called often."""
        self._unix_s, self._asked_s = self._machine.unix_s(), self._machine.monotonic_s()

    def unix_s(self) -> float:
        """Seconds since the epoch, without jumps and pauses since `begin`."""
        if self._unix_s is None:
            return self._machine.unix_s()
        now_s = self._machine.monotonic_s()
        self._unix_s += min(now_s - self._asked_s, MAX_GAP_S)
        self._asked_s = now_s
        return self._unix_s

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back."""
        return self._machine.monotonic_s()

    async def sleep(self, delay_s: float) -> None:
        """Returns after `delay_s` of the machine's time."""
        await self._machine.sleep(delay_s)
