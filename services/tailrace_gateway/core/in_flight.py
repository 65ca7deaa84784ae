"""A call under way, for one listener or for several that asked the same.

Invariants: the call is cancelled when its last listener has gone; every listener of a stream hears it
from its beginning; who ends a call says why, and every listener is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from tailrace_gateway.core.call import CallStart, Completion, Piece
from tailrace_gateway.core.errors import ApiError, SessionOverError


class InFlightCall:
    """The task that samples, what it said so far, and how many listen."""

    def __init__(self, streams: bool) -> None:
        self.streams = streams
        self.opening: CallStart | None = None
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()
        self._num_listeners = 0
        self._refusal: ApiError | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[Completion] | None = None

    def start(self, work: Coroutine[Any, Any, Completion]) -> None:
        """Begin to sample."""
        self.task = asyncio.create_task(work)
        if self.streams:
            self.task.add_done_callback(lambda _: self._news.set())

    def set_deadline(self, left_s: float, refusal: ApiError) -> None:
        """End the call with `refusal` after so long, unless `lift` comes before."""
        self._deadline = asyncio.get_running_loop().call_later(left_s, self.cancel, refusal)

    def clear_deadline(self) -> None:
        """What `limit` said holds no more."""
        if self._deadline is not None:
            self._deadline.cancel()

    def cancel(self, refusal: ApiError) -> None:
        """End the call; its listeners are told why."""
        self._refusal = refusal
        if self.task is not None:
            self.task.cancel()

    def result(self) -> Completion:
        """What became of a call that is over; raises an `ApiError` if it failed or was ended."""
        task = self.task
        assert task is not None
        if not task.cancelled():
            return task.result()
        raise self._refusal or SessionOverError("the session was closed while this call ran")

    def open(self, opening: CallStart) -> None:
        """The call was accepted."""
        self.opening = opening
        self._news.set()

    def add_piece(self, piece: Piece) -> None:
        """New tokens."""
        self._pieces.append(piece)
        self._news.set()

    @property
    def is_joinable(self) -> bool:
        """Whether it runs or ended well; one that is being cancelled, or failed, answers nobody."""
        if self.task is None or self.task.cancelling() or self.task.cancelled():
            return False
        return not self.task.done() or self.task.exception() is None

    def join(self) -> None:
        """One more listens."""
        self._num_listeners += 1

    def leave(self) -> None:
        """One listener has gone, served or not."""
        self._num_listeners -= 1
        if self._num_listeners == 0 and self.task is not None and not self.task.done():
            self.task.cancel()

    async def opened(self) -> CallStart | None:
        """Wait for the beginning; None when the call failed before it."""
        while self.opening is None and not self._is_over():
            await self._wait()
        return self.opening

    async def follow(self) -> AsyncIterator[Piece]:
        """All pieces, from the first to the last."""
        told = 0
        while True:
            while told < len(self._pieces):
                yield self._pieces[told]
                told += 1
            if self._is_over():
                return
            await self._wait()

    def _is_over(self) -> bool:
        return self.task is not None and self.task.done()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()
