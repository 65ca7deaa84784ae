"""A call on SGLang: from its outputs to chunks.

Invariants: each token is sent once, with the version that sampled it; the last chunk comes once, at a
stop id, at the token that completes a stop string, at the length or at the abort.
"""

import msgspec
import numpy as np

from tailrace_inference.adapters.sglang_thread import CallOutput
from tailrace_inference.core.requests import failed
from tailrace_inference.engine.stops import StopStrings
from tailrace_inference.ports import OnChunk
from tailrace_protos.base import EMPTY, pack_float32, pack_int32
from tailrace_protos.generation import (
    CallErrorCode,
    FinishReason,
    GenerateRequest,
    TokenChunk,
    TokenSpan,
)


class CallCounts(msgspec.Struct):
    """Counters of an engine since its start."""

    generated: int = 0
    prompt: int = 0
    prefix_hit: int = 0
    recomputed: int = 0
    stale: int = 0  # sampled over keys and values of an older version
    preempted: int = 0
    finished: int = 0
    nonfinite: int = 0


class SGLangCall:
    """One call from `submit` to SGLang's last word."""

    def __init__(
        self, rid: str, request: GenerateRequest, on_chunk: OnChunk, num_prompt: int, counts: CallCounts
    ) -> None:
        self.rid, self.request, self.on_chunk = rid, request, on_chunk
        self.num_prompt = num_prompt
        self.stops: StopStrings | None = None
        self.num_tokens = 0
        self.num_cached = 0
        self.is_sent = False  # SGLang knows it
        self.is_closed = False  # its last chunk is out
        self._counts = counts
        self._versions: list[tuple[int, int]] = []  # first token and policy version, ascending
        self._num_swaps = 0  # that retracted it
        self._keeps_kv = False

    def send(self, policy_version: int) -> None:
        """Notes that SGLang gets the call."""
        self.is_sent = True
        self._versions = [(0, policy_version)]

    def swap(self, start: int, policy_version: int, *, recompute: bool) -> None:
        """Notes a version that samples tokens from `start` on."""
        self._versions.append((start, policy_version))
        self._keeps_kv = not recompute
        if recompute and start:
            self._num_swaps += 1
            self._counts.recomputed += self.num_prompt + start

    def take(self, output: CallOutput) -> bool:
        """Sends new tokens, up to a stop string; True if SGLang shall end the call for it."""
        ended = output.finish is not None or bool(output.error)
        if ended:
            self._counts.preempted += max(0, output.num_retractions - self._num_swaps)
        if self.is_closed:
            return False
        if not self.num_tokens and output.token_ids:
            self.num_cached = output.num_cached
            self._counts.prompt += self.num_prompt
            self._counts.prefix_hit += self.num_cached
        count, matched = self._first_stop(output)
        if output.error:
            self.is_closed = True
            self.on_chunk(failed(self.request.call_id, CallErrorCode.INTERNAL, output.error))
        elif matched is not None:
            self.close(FinishReason.STOP, matched, output, count)
        elif output.finish is not None:
            reason = FinishReason(output.finish["type"])
            self.close(reason, output.finish.get("matched"), output, count)
        elif count:
            self.on_chunk(self._chunk(output, count))
        return matched is not None and not ended

    def close(
        self,
        reason: FinishReason,
        matched: int | str | None = None,
        output: CallOutput | None = None,
        count: int = 0,
    ) -> None:
        """Sends the last chunk, with the first `count` tokens of `output`."""
        self.is_closed = True
        self._counts.finished += 1
        chunk = self._chunk(output or CallOutput(self.rid), count)
        self.on_chunk(
            msgspec.structs.replace(
                chunk, finish_reason=reason, stop_matched=matched, num_cached_tokens=self.num_cached
            )
        )

    def _first_stop(self, output: CallOutput) -> tuple[int, str | None]:
        """Number of tokens up to the first stop string, and the string; a stop id at its token wins."""
        num_new = len(output.token_ids)
        if self.stops is None:
            return num_new, None
        has_stop_id = output.finish is not None and output.finish["type"] == "stop"
        for index, token_id in enumerate(output.token_ids):
            matched = self.stops.push(token_id)
            if matched is not None and not (has_stop_id and index + 1 == num_new):
                return index + 1, matched
        return num_new, None

    def _spans(self, count: int) -> tuple[TokenSpan, ...]:
        """Versions of the next `count` tokens."""
        first, last = self.num_tokens, self.num_tokens + count
        ends = [start for start, _ in self._versions[1:]] + [last]
        spans = []
        for (start, policy_version), end in zip(self._versions, ends, strict=True):
            size = min(end, last) - max(start, first)
            if size > 0:
                spans.append(TokenSpan(policy_version, "", size))
        return tuple(spans)

    def _chunk(self, output: CallOutput, count: int) -> TokenChunk:
        """The first `count` tokens of an output."""
        logprobs = np.array(output.logprobs[:count], np.float32)
        spans = self._spans(count) if count else ()
        self.num_tokens += count
        self._counts.generated += count
        self._counts.nonfinite += count - int(np.count_nonzero(np.isfinite(logprobs)))
        if self._keeps_kv:
            first = self._versions[0][1]
            self._counts.stale += sum(s.num_tokens for s in spans if s.policy_version != first)
        top_ids = top_logprobs = EMPTY
        if self.request.top_logprobs:
            tops = [top for step in output.tops[:count] for top in step]
            top_ids = pack_int32(np.array([top[1] for top in tops], np.int32))
            top_logprobs = pack_float32(np.array([top[0] for top in tops], np.float32))
        return TokenChunk(
            self.request.call_id,
            pack_int32(np.array(output.token_ids[:count], np.int32)),
            pack_float32(logprobs),
            spans,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )
