"""A call's tokens put together: what `GenerateCall.collect` returns and what a failed call leaves.

Invariant: `token_ids`, `inference_logprobs` and the tokens counted by `spans` are always
equally many, and a prefix of what the server sampled; so are the rows of `top_ids` and `top_logprobs`
where the call asked for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace.channel.tops import NO_TOPS, TopArrays, TopLedger, tops_per_token
from tailrace.provenance import join_spans
from tailrace_protos.base import as_float32, as_int32
from tailrace_protos.generation import FinishReason, TokenChunk, TokenSpan


@dataclass(frozen=True, slots=True, eq=False)
class Generation:
    """Sampled tokens of one call; `finish_reason` is None when the call did not end by itself."""

    token_ids: NDArray[np.int32]  # [T]
    inference_logprobs: NDArray[np.float32]  # [T]
    spans: tuple[TokenSpan, ...]  # num_tokens sum to T; neighbours differ
    finish_reason: FinishReason | None
    stop_matched: int | str | None
    num_cached_tokens: int  # prompt tokens whose KV was reused
    top_ids: NDArray[np.int32] | None = None  # [T, k], the likeliest first; None: not asked for
    top_logprobs: NDArray[np.float32] | None = None  # [T, k]

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    def sampled_by(self, source: str) -> Generation:
        """The same tokens, all of one source."""
        return Generation(
            self.token_ids,
            self.inference_logprobs,
            tuple(TokenSpan(s.policy_version, source, s.num_tokens) for s in self.spans),
            self.finish_reason,
            self.stop_matched,
            self.num_cached_tokens,
            self.top_ids,
            self.top_logprobs,
        )


def join_tops(parts: Sequence[Generation]) -> TopArrays:
    """`top_ids` and `top_logprobs` of consecutive parts; None unless all their tokens have them."""
    ids = [part.top_ids for part in parts if part.num_tokens and part.top_ids is not None]
    logprobs = [p.top_logprobs for p in parts if p.num_tokens and p.top_logprobs is not None]
    if not ids or sum(map(len, ids)) != sum(part.num_tokens for part in parts):
        return None, None
    return np.concatenate(ids), np.concatenate(logprobs)


class TokenLedger:
    """Grows by chunks and copies their bytes: a view would keep whole frames alive."""

    __slots__ = ("last", "logprob_bytes", "num_tokens", "spans", "token_bytes", "tops")

    def __init__(self) -> None:
        self.token_bytes = bytearray()
        self.logprob_bytes = bytearray()
        self.spans: list[TokenSpan] = []
        self.num_tokens = 0
        self.tops: TopLedger | None = None  # once a chunk brought some
        self.last: TokenChunk | None = None  # the chunk with the finish reason or the error

    def add(self, chunk: TokenChunk) -> str:
        """Append a chunk's tokens; returns what is wrong with it instead, or an empty string."""
        num_bytes = len(chunk.token_ids)
        if num_bytes != len(chunk.inference_logprobs) or num_bytes & 3:
            return f"{num_bytes} bytes of ids with {len(chunk.inference_logprobs)} of log-probabilities"
        num_spanned = 0
        for span in chunk.spans:
            num_spanned += span.num_tokens
        if num_spanned != num_bytes >> 2:
            return f"{num_bytes >> 2} tokens with versions for {num_spanned}"
        if (chunk.top_ids or self.tops) and (wrong := self._add_tops(chunk)):
            return wrong
        self.token_bytes += chunk.token_ids
        self.logprob_bytes += chunk.inference_logprobs
        self.spans.extend(chunk.spans)
        self.num_tokens += num_spanned
        if chunk.finish_reason is not None or chunk.error is not None:
            self.last = chunk
        return ""

    def _add_tops(self, chunk: TokenChunk) -> str:
        tops = self.tops
        if tops is None:  # all tokens of a call have them or none
            tops = TopLedger(0 if self.num_tokens else tops_per_token(chunk))
        wrong = tops.add(chunk)
        if not wrong:
            self.tops = tops
        return wrong

    def since(self, num_tokens: int, num_spans: int, call_id: str) -> TokenChunk:
        """Everything after the first `num_tokens` tokens and `num_spans` spans as one chunk."""
        last = self.last
        top_ids, top_logprobs = self.tops.since(num_tokens) if self.tops else NO_TOPS
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

    def generation(self) -> Generation:
        """All tokens so far."""
        last = self.last
        top_ids, top_logprobs = self.tops.arrays() if self.tops else (None, None)
        return Generation(
            as_int32(memoryview(bytes(self.token_bytes))),
            as_float32(memoryview(bytes(self.logprob_bytes))),
            join_spans(self.spans),
            last.finish_reason if last else None,
            last.stop_matched if last else None,
            last.num_cached_tokens if last else 0,
            top_ids,
            top_logprobs,
        )
