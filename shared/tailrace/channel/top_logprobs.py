"""Top log-probabilities: the k most likely tokens of each step of a call, if the call requested them.

Invariant: each sampled token of a call has k ids and k log-probabilities, stored token by token: the
first T * k entries belong to the first T tokens.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace_protos.base import EMPTY, Float32Bytes, Int32Bytes, as_float32, as_int32
from tailrace_protos.generation import TokenChunk

TopLogprobArrays = tuple[
    NDArray[np.int32] | None, NDArray[np.float32] | None
]  # [T, k] both, or None both
TopLogprobBytes = tuple[Int32Bytes, Float32Bytes]  # [T * k] both
NO_TOP_LOGPROBS: TopLogprobBytes = (EMPTY, EMPTY)


class TopLogprobBuffer:
    """Top log-probabilities of the received chunks of one call; `width` is k."""

    __slots__ = ("_ids", "_logprobs", "width")

    def __init__(self, width: int) -> None:
        self.width = width
        self._ids = bytearray()
        self._logprobs = bytearray()

    def add(self, chunk: TokenChunk) -> str:
        """Appends those of a chunk; returns the problem of a malformed chunk instead, else ''."""
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

    def since(self, num_tokens: int) -> TopLogprobBytes:
        """Returns those after the first `num_tokens` tokens."""
        start = 4 * self.width * num_tokens
        return memoryview(bytes(self._ids[start:])), memoryview(bytes(self._logprobs[start:]))

    def arrays(self) -> TopLogprobArrays:
        """Returns all so far."""
        ids, logprobs = self.since(0)
        return as_int32(ids).reshape(-1, self.width), as_float32(logprobs).reshape(-1, self.width)


def num_top_logprobs(chunk: TokenChunk) -> int:
    """Returns k of a chunk; 0 without top log-probabilities."""
    return len(chunk.top_ids) // len(chunk.token_ids) if len(chunk.token_ids) else 0


def top_logprob_arrays(chunk: TokenChunk) -> TopLogprobArrays:
    """Returns those of one chunk."""
    if not chunk.top_ids:
        return None, None
    return as_top_logprobs(chunk.top_ids, chunk.top_logprobs, len(chunk.token_ids) >> 2)


def as_top_logprobs(ids: Int32Bytes, logprobs: Float32Bytes, num_tokens: int) -> TopLogprobArrays:
    """Returns read-only views [T, k] of the raw bytes of `num_tokens` tokens."""
    if not num_tokens:
        return None, None
    return as_int32(ids).reshape(num_tokens, -1), as_float32(logprobs).reshape(num_tokens, -1)


def merge_top_logprobs(parts: Sequence[TokenChunk]) -> TopLogprobBytes:
    """Joins those of consecutive chunks of one call."""
    return (
        memoryview(b"".join([part.top_ids for part in parts])),
        memoryview(b"".join([part.top_logprobs for part in parts])),
    )


def cut_top_logprobs(chunk: TokenChunk, start: int, end: int) -> TopLogprobBytes:
    """Returns those of tokens `start` to `end`."""
    if not chunk.top_ids:
        return NO_TOP_LOGPROBS
    first, last = (4 * num_top_logprobs(chunk) * place for place in (start, end))
    return chunk.top_ids[first:last], chunk.top_logprobs[first:last]
