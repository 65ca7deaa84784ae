"""Tokens of a call: `Generation`, the buffer that collects chunks, and operations on chunks.

Invariant: `token_ids`, `inference_logprobs` and the tokens counted by `spans` have the same length, and
are a prefix of the tokens that the server sampled. The same holds for the rows of `top_ids` and
`top_logprobs` if the call requested them.
"""

import time
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.channel.top_logprobs import (
    NO_TOP_LOGPROBS,
    TopLogprobArrays,
    TopLogprobBuffer,
    cut_top_logprobs,
    merge_top_logprobs,
    num_top_logprobs,
)
from tailrace.provenance import cut_spans, join_spans
from tailrace_protos.base import as_float32, as_int32
from tailrace_protos.generation import FinishReason, TokenChunk, TokenSpan


class Generation(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Sampled tokens of one call; `finish_reason` is None after a failure."""

    token_ids: NDArray[np.int32]  # [T]
    inference_logprobs: NDArray[np.float32]  # [T]
    spans: tuple[TokenSpan, ...]  # num_tokens sum to T; neighbours differ
    finish_reason: FinishReason | None
    stop_matched: int | str | None
    num_cached_tokens: int  # prompt tokens whose KV was reused
    top_ids: NDArray[np.int32] | None = None  # [T, k], most likely first; None: not requested
    top_logprobs: NDArray[np.float32] | None = None  # [T, k]
    first_token_at_s: float = 0.0  # arrival of the first tokens on this process's clock; 0: unknown

    @property
    def num_tokens(self) -> int:
        """Number of tokens T."""
        return len(self.token_ids)

    def sampled_by(self, source: str) -> "Generation":
        """Returns the same tokens with `source` in all spans."""
        return Generation(
            self.token_ids,
            self.inference_logprobs,
            tuple([TokenSpan(s.policy_version, source, s.num_tokens) for s in self.spans]),
            self.finish_reason,
            self.stop_matched,
            self.num_cached_tokens,
            self.top_ids,
            self.top_logprobs,
            self.first_token_at_s,
        )


def join_top_logprobs(parts: Sequence[Generation]) -> TopLogprobArrays:
    """Joins `top_ids` and `top_logprobs` of consecutive parts; None unless all tokens have them."""
    ids = [part.top_ids for part in parts if part.num_tokens and part.top_ids is not None]
    logprobs = [p.top_logprobs for p in parts if p.num_tokens and p.top_logprobs is not None]
    if not ids or sum(map(len, ids)) != sum(part.num_tokens for part in parts):
        return None, None
    return np.concatenate(ids), np.concatenate(logprobs)


class TokenBuffer:
    """Buffer of received chunks; it copies bytes, since views would keep whole frames in memory."""

    __slots__ = (
        "first_token_at_s",
        "last",
        "logprob_bytes",
        "num_tokens",
        "spans",
        "token_bytes",
        "top_buffer",
    )

    def __init__(self) -> None:
        self.token_bytes = bytearray()
        self.logprob_bytes = bytearray()
        self.spans: list[TokenSpan] = []
        self.num_tokens = 0
        self.first_token_at_s = 0.0
        self.top_buffer: TopLogprobBuffer | None = None  # from the first chunk that has some
        self.last: TokenChunk | None = None  # the chunk with the finish reason or the error

    def add(self, chunk: TokenChunk) -> str:
        """Appends the tokens of a chunk; returns the problem of a malformed chunk instead, else ''."""
        num_tokens, problem = _count_tokens(chunk)
        if problem:
            return problem
        if (chunk.top_ids or self.top_buffer) and (problem := self._add_top_logprobs(chunk)):
            return problem
        if num_tokens and not self.num_tokens:
            self.first_token_at_s = time.monotonic()
        self.token_bytes += chunk.token_ids
        self.logprob_bytes += chunk.inference_logprobs
        self.spans.extend(chunk.spans)
        self.num_tokens += num_tokens
        if chunk.finish_reason is not None or chunk.error is not None:
            self.last = chunk
        return ""

    def _add_top_logprobs(self, chunk: TokenChunk) -> str:
        buffer = self.top_buffer
        if buffer is None:  # all tokens of a call have them, or none
            buffer = TopLogprobBuffer(0 if self.num_tokens else num_top_logprobs(chunk))
        problem = buffer.add(chunk)
        if not problem:
            self.top_buffer = buffer
        return problem

    def since(self, num_tokens: int, num_spans: int, call_id: str) -> TokenChunk:
        """Returns the tokens after the first `num_tokens` tokens and `num_spans` spans as one chunk."""
        last = self.last
        top_ids, top_logprobs = (
            self.top_buffer.since(num_tokens) if self.top_buffer else NO_TOP_LOGPROBS
        )
        return TokenChunk(
            call_id=call_id,
            token_ids=memoryview(bytes(self.token_bytes[4 * num_tokens :])),
            inference_logprobs=memoryview(bytes(self.logprob_bytes[4 * num_tokens :])),
            spans=join_spans(self.spans[num_spans:]),
            finish_reason=last.finish_reason if last else None,
            stop_matched=last.stop_matched if last else None,
            num_cached_tokens=last.num_cached_tokens if last else 0,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def generation(self, *, copies: bool = False) -> Generation:
        """Returns all tokens so far; without `copies` as views, after which the buffer cannot grow."""
        last = self.last
        token_bytes, logprob_bytes = memoryview(self.token_bytes), memoryview(self.logprob_bytes)
        if copies:
            token_bytes = memoryview(bytes(token_bytes))
            logprob_bytes = memoryview(bytes(logprob_bytes))
        top_ids, top_logprobs = self.top_buffer.arrays() if self.top_buffer else (None, None)
        return Generation(
            as_int32(token_bytes.toreadonly()),
            as_float32(logprob_bytes.toreadonly()),
            join_spans(self.spans),
            last.finish_reason if last else None,
            last.stop_matched if last else None,
            last.num_cached_tokens if last else 0,
            top_ids,
            top_logprobs,
            self.first_token_at_s,
        )


def _count_tokens(chunk: TokenChunk) -> tuple[int, str]:
    """Counts the tokens of a chunk; tells where ids, log-probabilities and spans disagree, else ''."""
    num_bytes = len(chunk.token_ids)
    if num_bytes != len(chunk.inference_logprobs) or num_bytes & 3:
        return 0, f"{num_bytes} bytes of ids with {len(chunk.inference_logprobs)} of log-probabilities"
    num_spanned = 0
    for span in chunk.spans:
        num_spanned += span.num_tokens
    if num_spanned != num_bytes >> 2:
        return 0, f"{num_bytes >> 2} tokens with versions for {num_spanned}"
    return num_spanned, ""


def merge_chunks(parts: list[TokenChunk]) -> TokenChunk:
    """Joins consecutive chunks of one call; the end of the last chunk is the end of the result."""
    last = parts[-1]
    top_ids, top_logprobs = merge_top_logprobs(parts) if parts[0].top_ids else NO_TOP_LOGPROBS
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


def split_chunk(chunk: TokenChunk, max_tokens: int) -> list[TokenChunk]:
    """Splits a chunk into chunks of at most `max_tokens`; only the last one ends the call."""
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
    """Returns tokens `start` to `end`, without the end of the call."""
    top_ids, top_logprobs = cut_top_logprobs(chunk, start, end)
    return TokenChunk(
        chunk.call_id,
        chunk.token_ids[4 * start : 4 * end],
        chunk.inference_logprobs[4 * start : 4 * end],
        cut_spans(chunk.spans, start, end),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
    )
