"""Simulated time: calls that wait for their moment."""

import heapq
from collections.abc import Callable
from typing import Any


class Timetable:
    """Calls by time; those of the same time keep the order in which they were asked for."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._n = 0

    def at(self, time_s: float, call: Callable[..., None], *args: Any) -> None:
        """Call something at a time."""
        self._n += 1
        heapq.heappush(self._calls, (time_s, self._n, call, args))

    def advance(self) -> bool:
        """Go on to the next call and make it; False if there is none."""
        if not self._calls:
            return False
        self.now_s, _, call, args = heapq.heappop(self._calls)
        call(*args)
        return True
