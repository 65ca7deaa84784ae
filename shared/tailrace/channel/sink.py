"""The server's end of one call: merges what the engine sends token by token.

Tokens of a call are held back until there are `chunk_tokens` of them, `stream_interval_ms` has passed,
or the call ends; while the client is slow they keep growing into one chunk instead. The last chunk is
never held back for the interval.
"""

from __future__ import annotations

from typing import Protocol

from tailrace.channel.tops import NO_TOPS, cut_tops, merged_tops, tops_per_token
from tailrace.provenance import cut_spans, join_spans
from tailrace_protos.generation import CallError, CallErrorCode, TokenChunk

MAX_CHUNK_TOKENS = 65536  # 512 KiB of ids and log-probabilities: a chunk fits into a frame


class SinkLink(Protocol):
    """What a sink needs of the link to its client."""

    @property
    def congested(self) -> bool:
        """Whether the client is slow to take frames."""

    def schedule(self, sink: CallSink) -> None:
        """Send what this call has at the end of the loop tick."""

    def linger(self, sink: CallSink) -> None:
        """Flush this call at the next stream interval."""

    def on_done(self, sink: CallSink) -> None:
        """The engine is done with a call."""


class CallSink:
    """`ChunkSink` of one call. It outlives its link: an engine may finish what nobody waits for."""

    __slots__ = (
        "_chunk_tokens",
        "_link",
        "_num_tokens",
        "_parts",
        "_scheduled",
        "call_id",
        "done",
        "lingering",
        "muted",
    )

    def __init__(self, call_id: str, link: SinkLink, chunk_tokens: int) -> None:
        self.call_id = call_id
        self.done = False  # the engine sent the last chunk
        self.muted = False  # nobody waits for it any more
        self.lingering = False  # on the link's list of calls with tokens held back
        self._link = link
        self._scheduled = False  # on the link's list of calls to send this tick
        self._chunk_tokens = chunk_tokens
        self._parts: list[TokenChunk] = []
        self._num_tokens = 0

    def send(self, chunk: TokenChunk) -> None:
        """See `ChunkSink.send`."""
        if self.done:
            return
        is_last = chunk.finish_reason is not None or chunk.error is not None
        if is_last:
            self.done = True
            self._link.on_done(self)
        if self.muted:
            return
        self._parts.append(chunk)
        self._num_tokens += len(chunk.token_ids) >> 2
        if (is_last or self._num_tokens >= self._chunk_tokens) and not self._link.congested:
            self._schedule()
        elif not self.lingering:
            self.lingering = True
            self._link.linger(self)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._link.schedule(self)

    def fail(self, code: CallErrorCode, reason: str, retry_after_s: float = 0.0) -> None:
        """End the call with an error."""
        self.send(TokenChunk(self.call_id, error=CallError(code, reason, retry_after_s)))

    def on_interval(self) -> None:
        """The stream interval is over."""
        self.lingering = False
        if self._link.congested:
            self.lingering = True
            self._link.linger(self)
        elif self._parts:
            self._schedule()

    def take(self) -> list[TokenChunk]:
        """Everything held back, as one chunk unless that would be too large for a frame."""
        self._scheduled = False
        parts, self._parts = self._parts, []
        self._num_tokens = 0
        if not parts:
            return parts
        chunk = parts[0] if len(parts) == 1 else merge(parts)
        limit = MAX_CHUNK_TOKENS
        if chunk.top_ids:
            limit //= 1 + tops_per_token(chunk)
        return [chunk] if len(chunk.token_ids) <= 4 * limit else split(chunk, limit)


def merge(parts: list[TokenChunk]) -> TokenChunk:
    """Consecutive chunks of one call as one; the last one's ending holds."""
    last = parts[-1]
    top_ids, top_logprobs = merged_tops(parts) if parts[0].top_ids else NO_TOPS
    return TokenChunk(
        last.call_id,
        memoryview(b"".join([part.token_ids for part in parts])),
        memoryview(b"".join([part.inference_logprobs for part in parts])),
        join_spans([span for part in parts for span in part.spans]),
        last.finish_reason,
        last.stop_matched,
        last.num_cached_tokens,
        last.error,
        top_ids,
        top_logprobs,
    )


def split(chunk: TokenChunk, max_tokens: int) -> list[TokenChunk]:
    """A chunk as consecutive chunks of at most `max_tokens`; only the last one has the ending."""
    num_tokens = len(chunk.token_ids) >> 2
    starts = range(0, num_tokens, max_tokens)
    *pieces, final = (_cut(chunk, start, min(start + max_tokens, num_tokens)) for start in starts)
    ending = TokenChunk(
        chunk.call_id,
        final.token_ids,
        final.inference_logprobs,
        final.spans,
        chunk.finish_reason,
        chunk.stop_matched,
        chunk.num_cached_tokens,
        chunk.error,
        final.top_ids,
        final.top_logprobs,
    )
    return [*pieces, ending]


def _cut(chunk: TokenChunk, start: int, end: int) -> TokenChunk:
    """Tokens `start` to `end`, without the ending."""
    top_ids, top_logprobs = cut_tops(chunk, start, end)
    return TokenChunk(
        chunk.call_id,
        chunk.token_ids[4 * start : 4 * end],
        chunk.inference_logprobs[4 * start : 4 * end],
        cut_spans(chunk.spans, start, end),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
