"""Lanes of work that wait for something outside: decisions, and events that wait for the disk.

Invariants: items leave a lane in their order, once they are done; an event is acknowledged only after
the log that holds it is on the disk; a slow disk holds up acknowledgements, but no event before
`MAX_UNSYNCED` wait.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Iterable
from typing import Generic, TypeVar

from tailrace.clock import Clock
from tailrace_scheduler import metrics
from tailrace_scheduler.ports import EventLog, EventSource

MAX_UNSYNCED = 1 << 16  # events; about 30 MB in Redis
SYNC_PAUSE_S = 0.05  # events of this time share one sync

T = TypeVar("T")


class Lane(Generic[T]):
    """Pending work in order; an item leaves when it is done."""

    def __init__(self, name: str) -> None:
        self._items: deque[T] = deque()
        self._filled = asyncio.Event()
        metrics.PENDING.labels(name).set_function(lambda: len(self._items))

    def __len__(self) -> int:
        return len(self._items)

    def put(self, items: Iterable[T]) -> None:
        """Append items."""
        self._items.extend(items)
        if self._items:
            self._filled.set()

    async def head(self, max_items: int) -> list[T]:
        """The first items, once there is one; they stay until `done`."""
        while not self._items:
            self._filled.clear()
            await self._filled.wait()
        return list(itertools.islice(self._items, max_items))

    def done(self, num_items: int) -> None:
        """The first items have been done."""
        for _ in range(num_items):
            self._items.popleft()


class Acknowledger:
    """Acknowledges events that the log on the disk holds."""

    def __init__(self, source: EventSource, log: EventLog, clock: Clock) -> None:
        self._source = source
        self._log = log
        self._clock = clock
        self._written: Lane[str] = Lane("acknowledge")
        self._has_room = asyncio.Event()

    def __len__(self) -> int:
        return len(self._written)

    async def take(self, seqs: Iterable[str]) -> None:
        """Takes events that were passed on; waits while too many of them wait for the disk."""
        self._written.put(seqs)
        while len(self._written) >= MAX_UNSYNCED:
            self._has_room.clear()
            await self._has_room.wait()

    async def run(self) -> None:
        """Syncs the log, then acknowledges what it held before, for ever."""
        while True:
            seqs = await self._written.head(MAX_UNSYNCED)
            await asyncio.to_thread(self._log.sync)
            await self._source.ack(seqs)
            self._written.done(len(seqs))
            self._has_room.set()
            await self._clock.sleep(SYNC_PAUSE_S)
