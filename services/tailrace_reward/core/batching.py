"""Conversations that wait for a model, put together into batches.

Invariants: a batch begins as soon as the one before is done, with the conversations that wait then;
those of similar length go together; a batch that fails fails alone.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

TokenIds = Sequence[int]
Run = Callable[[Sequence[TokenIds]], Awaitable[Sequence[float]]]


class Batches:
    """Passes conversations to `run`, at most `max_batch_tokens` at once, padding included."""

    def __init__(self, run: Run, max_batch_tokens: int) -> None:
        self._run = run
        self._max_batch_tokens = max_batch_tokens
        self._waiting: list[tuple[TokenIds, asyncio.Future[float]]] = []
        self._runner: asyncio.Task[None] | None = None

    async def score(self, token_ids: TokenIds) -> float:
        """Return the result of `run` for it; raises the errors of `run`."""
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((token_ids, future))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.create_task(self._run_all())
        return await future

    async def _run_all(self) -> None:
        while batch := self._next_batch():
            futures = [future for _, future in batch]
            result = await asyncio.gather(
                self._run([token_ids for token_ids, _ in batch]), return_exceptions=True
            )
            _settle(futures, result[0])

    def _next_batch(self) -> list[tuple[TokenIds, asyncio.Future[float]]]:
        """The oldest that waits, and as many of about its length as there is room for."""
        self._waiting = [each for each in self._waiting if not each[1].done()]  # given up meanwhile
        if not self._waiting:
            return []
        oldest, *others = self._waiting
        others.sort(key=lambda each: abs(len(each[0]) - len(oldest[0])))
        batch, longest = [oldest], len(oldest[0])
        for each in others:
            longest = max(longest, len(each[0]))
            if longest * (len(batch) + 1) > self._max_batch_tokens:
                break
            batch.append(each)
        taken = {id(each) for each in batch}
        self._waiting = [each for each in self._waiting if id(each) not in taken]
        return batch


def _settle(futures: Sequence[asyncio.Future[float]], result: Sequence[float] | BaseException) -> None:
    for index, future in enumerate(futures):
        if future.done():  # its caller has gone
            continue
        if isinstance(result, BaseException):
            future.set_exception(result)
        else:
            future.set_result(result[index])
