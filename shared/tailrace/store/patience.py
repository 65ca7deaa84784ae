"""One timer for many answers that are all waited for equally long.

A timeout of its own for every command costs as much as the command. Equal patience means that answers
run late in the order in which they were asked for, so only the oldest open one needs a timer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple


class _Open(NamedTuple):
    answer: asyncio.Future[Any]
    due_s: float  # time of the event loop


class Patience:
    """Fails answers that are `patience_s` old with what `late` makes."""

    def __init__(self, patience_s: float, late: Callable[[], Exception]) -> None:
        self._patience_s = patience_s
        self._late = late
        self._open: deque[_Open] = deque()
        self._alarm: asyncio.TimerHandle | None = None

    def limit(self, answer: asyncio.Future[Any]) -> None:
        """Wait for this answer from now on."""
        while self._open and self._open[0].answer.done():
            self._open.popleft()
        loop = asyncio.get_running_loop()
        self._open.append(_Open(answer, loop.time() + self._patience_s))
        if self._alarm is None:
            self._alarm = loop.call_at(self._open[0].due_s, self._on_alarm)

    def close(self) -> None:
        """Fail nothing any more."""
        self._open.clear()
        if self._alarm is not None:
            self._alarm.cancel()

    def _on_alarm(self) -> None:
        loop = asyncio.get_running_loop()
        while self._open and (self._open[0].answer.done() or self._open[0].due_s <= loop.time()):
            answer = self._open.popleft().answer
            if not answer.done():
                answer.set_exception(self._late())
        self._alarm = loop.call_at(self._open[0].due_s, self._on_alarm) if self._open else None
