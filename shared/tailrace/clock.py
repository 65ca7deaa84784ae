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
