"""One call from its caller's side: an iterator of chunks, or all tokens at once.

Invariants: a caller receives tokens in sampling order, and none after a loss; a call ends once, with
its last chunk or with a `ChannelError`; an aborted call also ends, when the server reports it.
"""

import asyncio
from collections.abc import Callable

from tailrace.channel.errors import ChannelError, GenerateRefusedError
from tailrace.channel.generation import Generation, TokenBuffer
from tailrace_protos.generation import FinishReason, GenerateRequest, TokenChunk


class GenerateCall:
    """Async iterator of `TokenChunk`, for one reader; joins chunks that arrive between two reads.

    Raises `GenerateRefusedError` when the server answers with an error, and `ChannelError` when the
    link is lost; in both cases after the tokens received before.
    """

    __slots__ = (
        "_buffer",
        "_error",
        "_on_abort",
        "_read_end",
        "_read_spans",
        "_read_tokens",
        "_request",
        "_waiter",
        "_wants_all",
        "call_id",
        "ended",
        "quiet_ticks",
        "server_id",
    )

    def __init__(
        self, request: GenerateRequest, server_id: str, on_abort: "Callable[[GenerateCall], None]"
    ) -> None:
        self.call_id = request.call_id
        self.server_id = server_id
        self.ended = False
        self.quiet_ticks = 0  # keepalive ticks since the last chunk
        self._request: GenerateRequest | None = request  # until sent
        self._on_abort = on_abort
        self._buffer = TokenBuffer()
        self._error: ChannelError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._wants_all = False
        self._read_tokens = 0
        self._read_spans = 0
        self._read_end = False

    def __aiter__(self) -> "GenerateCall":
        return self

    async def __anext__(self) -> TokenChunk:
        buffer = self._buffer
        while buffer.num_tokens == self._read_tokens and not self.ended:
            await self._wait(wants_all=False)
        if buffer.num_tokens > self._read_tokens or self._has_unread_end():
            return self._read()
        if self._error is not None:
            raise self._error
        raise StopAsyncIteration

    def _has_unread_end(self) -> bool:
        return self.ended and self._error is None and not self._read_end

    def _read(self) -> TokenChunk:
        chunk = self._buffer.since(self._read_tokens, self._read_spans, self.call_id)
        self._read_tokens = self._buffer.num_tokens
        self._read_spans = len(self._buffer.spans)
        self._read_end = self.ended
        return chunk

    async def collect(self) -> Generation:
        """Returns all tokens of the call. A cancellation aborts the call."""
        try:
            while not self.ended:
                await self._wait(wants_all=True)
        except asyncio.CancelledError:
            self.abort()
            raise
        if self._error is not None:
            raise self._error
        return self._buffer.generation()

    def partial(self) -> Generation:
        """Returns the tokens received so far, also after an error."""
        return self._buffer.generation(copies=not self.ended)

    def abort(self) -> None:
        """Asks the server to stop; the call then ends with finish reason `abort`."""
        if not self.ended:
            self._on_abort(self)

    def take_request(self) -> GenerateRequest:
        """Returns the request, once, and releases it: a long prompt must not stay in memory."""
        request = self._request
        assert request is not None
        self._request = None
        return request

    def feed(self, chunk: TokenChunk) -> bool:
        """Adds a chunk of the server; returns False for a malformed chunk, which ends the call."""
        if self.ended:
            return True
        self.quiet_ticks = 0
        problem = self._buffer.add(chunk)
        if problem:
            self.fail(f"the server sent a malformed chunk: {problem}")
            return False
        if chunk.error is not None:
            self._end(GenerateRefusedError(self.server_id, chunk.error, self._buffer.generation()))
        elif chunk.finish_reason is not None:
            self._end(None)
        elif not self._wants_all:
            self._wake()
        return True

    def fail(self, reason: str) -> None:
        """Ends the call without its last chunk."""
        if not self.ended:
            self._end(ChannelError(self.server_id, reason, self._buffer.generation()))

    def end_unsent(self) -> None:
        """Ends a call that was aborted before it was sent."""
        self.feed(TokenChunk(call_id=self.call_id, finish_reason=FinishReason.ABORT))

    def _end(self, error: ChannelError | None) -> None:
        self.ended = True
        self._error = error
        self._wake()

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def _wait(self, *, wants_all: bool) -> None:
        assert self._waiter is None, f"call {self.call_id} has two readers"
        self._wants_all = wants_all
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
