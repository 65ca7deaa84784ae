"""Batches requests: many small requests of one tick become one message.

Invariants: items go out in the order they came, at most `max_items` together; each caller gets the
answer to its own item, or the error of the send that carried it.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class Batcher(Generic[T, R]):
    """Collects items for `delay_s` (0: the rest of the loop's tick) and sends them in one call.

    It sends early at `max_items` items, or before the sum of `size_of(item)` would pass `max_size`.
    """

    def __init__(
        self,
        send: Callable[[Sequence[T]], Coroutine[Any, Any, Sequence[R]]],
        *,
        delay_s: float = 0.0,
        max_items: int = 512,
        size_of: Callable[[T], int] = lambda _: 0,
        max_size: int = 1,
    ) -> None:
        self._send = send
        self._delay_s = delay_s
        self._max_items = max_items
        self._size_of = size_of
        self._max_size = max_size
        self._size = 0
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._flushes: dict[asyncio.Task[Sequence[R]], list[asyncio.Future[R]]] = {}
        self._timer: asyncio.Handle | None = None

    def submit(self, item: T) -> asyncio.Future[R]:
        """Returns a future of the answer to `item`."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()
        size = self._size_of(item)
        if self._size + size > self._max_size:
            self._flush()
        self._size += size
        self._waiting.append((item, answer))
        if len(self._waiting) >= self._max_items:
            self._flush()
        elif self._timer is None:
            self._timer = (
                loop.call_later(self._delay_s, self._flush)
                if self._delay_s
                else loop.call_soon(self._flush)
            )
        return answer

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        batch = [(item, answer) for item, answer in self._waiting if not answer.done()]
        self._waiting, self._size = [], 0
        if not batch:
            return
        task = asyncio.create_task(self._send([item for item, _ in batch]))  # noqa: RUF006 (kept in _flushes)
        self._flushes[task] = [answer for _, answer in batch]
        task.add_done_callback(self._on_sent)

    def _on_sent(self, task: asyncio.Task[Sequence[R]]) -> None:
        """Gives each caller its part of the batch's result, or the batch's error."""
        answers = self._flushes.pop(task)
        if task.cancelled():
            for answer in answers:
                answer.cancel()
            return
        error = task.exception()
        if error is None and len(task.result()) != len(answers):
            error = RuntimeError(f"{len(task.result())} answers to {len(answers)} items")
        for index, answer in enumerate(answers):
            if answer.done():
                continue
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result()[index])
