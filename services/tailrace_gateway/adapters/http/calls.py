"""Model calls over HTTP, whichever dialect: read, begin, listen, answer whole or as it comes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from typing import Any, NamedTuple

from tailrace_gateway import metrics
from tailrace_gateway.adapters.http.exchange import Exchange
from tailrace_gateway.core.call import Completion, ModelCall
from tailrace_gateway.core.calls import Calls
from tailrace_gateway.core.errors import ApiError
from tailrace_gateway.core.running import RunningCall
from tailrace_gateway.core.sse import StreamDialect


class Dialect(NamedTuple):
    """How one dialect reads requests and tells replies; `read` returns the body in its own form too."""

    read: Callable[[bytes], tuple[Any, ModelCall]]
    answer: Callable[[Any, Completion], dict[str, Any]]
    stream: Callable[[Any], StreamDialect]


class CallRoute:
    """A route whose requests are model calls."""

    def __init__(self, calls: Calls, dialect: Dialect) -> None:
        self._calls = calls
        self._dialect = dialect

    async def __call__(self, exchange: Exchange) -> None:
        """Answer one request."""
        session_id = exchange.require_session()
        raw = await exchange.body()
        body, call = self._dialect.read(raw)
        name, is_retry = _retry_mark(exchange, raw)
        streams = bool(body.stream)
        running = await self._calls.begin(session_id, call, name, is_retry=is_retry, streams=streams)
        listening = _Listening(running, exchange)
        try:
            if streams:
                await self._tell(exchange, body, running, listening)
            elif await listening.until_over():
                await exchange.answer(self._dialect.answer(body, running.outcome()))
        finally:
            listening.end()

    async def _tell(
        self, exchange: Exchange, body: Any, running: RunningCall, listening: _Listening
    ) -> None:
        opening = await running.opened()
        if opening is None:
            if not listening.is_gone:
                running.outcome()
            return
        dialect = self._dialect.stream(body)
        await exchange.begin_events()
        await exchange.tell(dialect.begin(opening))
        async for piece in running.follow():
            if events := dialect.piece(piece):
                await exchange.tell(events)
        if not listening.is_gone:
            await exchange.tell(self._ending(dialect, running), last=True)

    def _ending(self, dialect: StreamDialect, running: RunningCall) -> bytes:
        try:
            completion = running.outcome()
        except ApiError as error:
            return dialect.error(error)
        return b"".join(map(dialect.choice, completion.choices)) + dialect.end(completion)


class _Listening:
    """One listener of a running call: leaves it when the client hangs up or was served."""

    def __init__(self, running: RunningCall, exchange: Exchange) -> None:
        assert running.task is not None
        self._running = running
        self._has_left = False
        self.is_gone = False
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running.task.add_done_callback(self._on_over)
        self._watch = asyncio.create_task(exchange.gone())
        self._watch.add_done_callback(self._on_gone)

    async def until_over(self) -> bool:
        """Wait for the call; False when the client hung up before."""
        await self._over
        return not self.is_gone

    def end(self) -> None:
        """Stop listening."""
        self._watch.cancel()
        self._leave()

    def _on_over(self, _: object) -> None:
        if not self._over.done():
            self._over.set_result(None)

    def _on_gone(self, watch: asyncio.Task[None]) -> None:
        if watch.cancelled():
            return
        self.is_gone = True
        if not self._has_left:
            metrics.ABORTED.inc()
        self._leave()
        self._on_over(watch)

    def _leave(self) -> None:
        if not self._has_left:
            self._has_left = True
            self._running.leave()


def _retry_mark(exchange: Exchange, raw: bytes) -> tuple[str, bool]:
    """A name that a request and its retries share, and whether this may be such a retry.

    Two equal requests without a mark are two samples: agents that vote ask the same thing often.
    """
    key = exchange.header(b"idempotency-key")
    digest = hashlib.blake2b(raw, digest_size=16)
    digest.update(f"\n{exchange.path}\n{key}".encode())
    count = exchange.header(b"x-stainless-retry-count")
    return digest.hexdigest(), bool(key) or (count.isdigit() and int(count) > 0)
