"""The likeliest tokens of every step of a call, for callers that asked for them.

Invariant: every sampled token of a call has equally many of them, k, ids and log-probabilities alike;
they are laid out token by token, so the first T * k entries belong to the first T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace_protos.base import EMPTY, Float32Bytes, Int32Bytes, as_float32, as_int32
from tailrace_protos.generation import TokenChunk

TopArrays = tuple[NDArray[np.int32] | None, NDArray[np.float32] | None]  # [T, k] both, or None both
TopBytes = tuple[Int32Bytes, Float32Bytes]  # [T * k] both
NO_TOPS: TopBytes = (EMPTY, EMPTY)


class TopLedger:
    """Grows with the chunks of one call; `width` is k."""

    __slots__ = ("_ids", "_logprobs", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self._ids = bytearray()
        self._logprobs = bytearray()

    def add(self, chunk: TokenChunk) -> str:
        """Append a chunk's; returns what is wrong with it instead, or an empty string."""
        num_ids, num_logprobs = len(chunk.top_ids), len(chunk.top_logprobs)
        if not num_ids == num_logprobs == self.width * len(chunk.token_ids):
            num_tokens = len(chunk.token_ids) >> 2
            return (
                f"{num_ids} bytes of top ids and {num_logprobs} of their log-probabilities with "
                f"{num_tokens} tokens of {self.width} each"
            )
        self._ids += chunk.top_ids
        self._logprobs += chunk.top_logprobs
        return ""

    def since(self, num_tokens: int) -> TopBytes:
        """Those after the first `num_tokens` tokens."""
        start = 4 * self.width * num_tokens
        return memoryview(bytes(self._ids[start:])), memoryview(bytes(self._logprobs[start:]))

    def arrays(self) -> TopArrays:
        """All so far."""
        ids, logprobs = self.since(0)
        return as_int32(ids).reshape(-1, self.width), as_float32(logprobs).reshape(-1, self.width)


def tops_per_token(chunk: TokenChunk) -> int:
    """k of a chunk; 0 without any."""
    return len(chunk.top_ids) // len(chunk.token_ids) if len(chunk.token_ids) else 0


def top_arrays(chunk: TokenChunk) -> TopArrays:
    """Those of one chunk."""
    if not chunk.top_ids:
        return None, None
    return as_tops(chunk.top_ids, chunk.top_logprobs, len(chunk.token_ids) >> 2)


def as_tops(ids: Int32Bytes, logprobs: Float32Bytes, num_tokens: int) -> TopArrays:
    """Read-only views [T, k] of the raw bytes of `num_tokens` tokens."""
    if not num_tokens:
        return None, None
    return as_int32(ids).reshape(num_tokens, -1), as_float32(logprobs).reshape(num_tokens, -1)


def merged_tops(parts: Sequence[TokenChunk]) -> TopBytes:
    """Those of consecutive chunks of one call."""
    return (
        memoryview(b"".join([part.top_ids for part in parts])),
        memoryview(b"".join([part.top_logprobs for part in parts])),
    )


def cut_tops(chunk: TokenChunk, start: int, end: int) -> TopBytes:
    """Those of tokens `start` to `end`."""
    if not chunk.top_ids:
        return NO_TOPS
    first, last = (4 * tops_per_token(chunk) * place for place in (start, end))
    return chunk.top_ids[first:last], chunk.top_logprobs[first:last]
