"""Model call in flight, with one listener or with several that sent the same request.

Invariants: the call is cancelled when its last listener leaves; each listener of a stream gets all
pieces from the first; a cancellation carries an error that each listener receives.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from tailrace_gateway.core.call import CallStart, Completion, Piece
from tailrace_gateway.core.errors import ApiError, SessionOverError


class InFlightCall:
    """Task that samples, the pieces so far, and the number of listeners."""

    def __init__(self, streams: bool) -> None:
        self.streams = streams
        self.opening: CallStart | None = None
        self._pieces: list[Piece] = []
        self._news = asyncio.Event()
        self._num_listeners = 0
        self._refusal: ApiError | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self.task: asyncio.Task[Completion] | None = None

    def start(self, work: Coroutine[Any, Any, Completion], on_end: Callable[[], None]) -> None:
        """Start the task; `on_end` is called before any listener hears of the end."""
        self.task = asyncio.create_task(work)
        self.task.add_done_callback(lambda _: on_end())
        if self.streams:
            self.task.add_done_callback(lambda _: self._news.set())

    def set_deadline(self, left_s: float, refusal: ApiError) -> None:
        """Cancel the call with `refusal` after `left_s`, unless `clear_deadline` comes first."""
        self._deadline = asyncio.get_running_loop().call_later(left_s, self.cancel, refusal)

    def clear_deadline(self) -> None:
        """Remove the deadline."""
        if self._deadline is not None:
            self._deadline.cancel()

    def cancel(self, refusal: ApiError) -> None:
        """Cancel the call; each listener receives `refusal`."""
        self._refusal = refusal
        if self.task is not None:
            self.task.cancel()

    def result(self) -> Completion:
        """Return the result of a finished call; raise an `ApiError` if it failed or was cancelled."""
        task = self.task
        assert task is not None
        if not task.cancelled():
            return task.result()
        raise self._refusal or SessionOverError("the session was closed while this call ran")

    def open(self, opening: CallStart) -> None:
        """Publish the start of the call."""
        self.opening = opening
        self._news.set()

    def add_piece(self, piece: Piece) -> None:
        """Publish new tokens."""
        self._pieces.append(piece)
        self._news.set()

    @property
    def is_joinable(self) -> bool:
        """True if a retry can join: the call runs or succeeded, and is not being cancelled."""
        if self.task is None or self.task.cancelling() or self.task.cancelled():
            return False
        return not self.task.done() or self.task.exception() is None

    def join(self) -> None:
        """Add a listener."""
        self._num_listeners += 1

    def leave(self) -> None:
        """Remove a listener; the last one cancels the call if it still runs."""
        self._num_listeners -= 1
        if self._num_listeners == 0 and self.task is not None and not self.task.done():
            self.task.cancel()

    async def opened(self) -> CallStart | None:
        """Wait for the start; return None if the call failed before it."""
        while self.opening is None and not self._is_over():
            await self._wait()
        return self.opening

    async def follow(self) -> AsyncIterator[Piece]:
        """Yield all pieces from the first to the last."""
        num_sent = 0
        while True:
            while num_sent < len(self._pieces):
                yield self._pieces[num_sent]
                num_sent += 1
            if self._is_over():
                return
            await self._wait()

    def _is_over(self) -> bool:
        return self.task is not None and self.task.done()

    async def _wait(self) -> None:
        self._news.clear()
        await self._news.wait()
