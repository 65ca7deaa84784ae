"""Time as a dependency: what waits or stamps takes a `Clock`, so that tests own the time."""

from __future__ import annotations

import asyncio
import heapq
import itertools
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


class ManualClock:
    """A clock that stands still until `advance` moves it; for tests and simulation."""

    def __init__(self, unix_s: float = 1_700_000_000.0) -> None:
        self._epoch_s = unix_s
        self._now_s = 0.0
        self._order = itertools.count()
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []

    def unix_s(self) -> float:
        """Seconds since the epoch."""
        return self._epoch_s + self._now_s

    def monotonic_s(self) -> float:
        """Seconds advanced so far."""
        return self._now_s

    async def sleep(self, delay_s: float) -> None:
        """Return once `advance` has passed the moment `delay_s` from now."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._sleepers, (self._now_s + delay_s, next(self._order), woken))
        await woken

    async def advance(self, delay_s: float) -> None:
        """Move time forward, waking sleepers in order; each runs before the next is woken."""
        end_s = self._now_s + delay_s
        await asyncio.sleep(0)
        while self._sleepers and self._sleepers[0][0] <= end_s:
            self._now_s, _, woken = heapq.heappop(self._sleepers)
            if not woken.done():
                woken.set_result(None)
            await asyncio.sleep(0)
        self._now_s = end_s
