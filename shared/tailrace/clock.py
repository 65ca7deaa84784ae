"""Time as a dependency: what waits or stamps takes a `Clock`, so that tests own the time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Wall time for stamps that others read, monotonic time for durations, and sleep."""

    def unix_s(self) -> float:
        """Seconds since the epoch."""
        ...

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return after `delay_s` of this clock's time."""
        ...


class SystemClock:
    """The machine's own time."""

    def unix_s(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back."""
        return time.monotonic()

    async def sleep(self, delay_s: float) -> None:
        """Return after `delay_s`."""
        await asyncio.sleep(delay_s)
