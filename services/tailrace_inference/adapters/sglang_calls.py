"""A call on SGLang: from its outputs to chunks.

Invariants: each token is sent once, with the version that sampled it; the last chunk comes once, at a
stop id, at the token that completes a stop string, at the length or at the abort.
"""

import msgspec
import numpy as np

from tailrace_inference.adapters.sglang_thread import CallOutput
from tailrace_inference.core.calls import CallCounts, find_stop, version_spans
from tailrace_inference.core.requests import failed
from tailrace_inference.engine.stops import StopStrings
from tailrace_inference.ports import OnChunk
from tailrace_protos.base import EMPTY, pack_float32, pack_int32
from tailrace_protos.generation import (
    CallErrorCode,
    FinishReason,
    GenerateRequest,
    TokenChunk,
)


class SGLangCall:
    """One call from `submit` to SGLang's last word."""

    def __init__(
        self, rid: str, request: GenerateRequest, on_chunk: OnChunk, num_prompt: int, counts: CallCounts
    ) -> None:
        self.rid, self.request, self.on_chunk = rid, request, on_chunk
        self.num_prompt = num_prompt
        self.stops: StopStrings | None = None
        self.guide = ""  # `GuideSpec`
        self.num_tokens = 0
        self.num_cached = 0
        self.is_sent = False  # SGLang knows it
        self.is_closed = False  # its last chunk is out
        self._counts = counts
        self._versions: list[tuple[int, int]] = []  # policy version and first token, ascending
        self._num_swaps = 0  # that retracted it
        self._keeps_kv = False

    def send(self, policy_version: int) -> None:
        """Notes that SGLang gets the call."""
        self.is_sent = True
        self._versions = [(policy_version, 0)]

    def swap(self, start: int, policy_version: int, *, recompute: bool) -> None:
        """Notes a version that samples tokens from `start` on."""
        self._versions.append((policy_version, start))
        self._keeps_kv = not recompute
        if recompute and start:
            self._num_swaps += 1
            self._counts.recomputed += self.num_prompt + start

    def take(self, output: CallOutput) -> bool:
        """Sends new tokens, up to a stop string; True if SGLang shall end the call for it."""
        ended = output.finish is not None or bool(output.error)
        self._count(output, ended)
        if self.is_closed:
            return False
        return self._answer(output) is not None and not ended

    def _answer(self, output: CallOutput) -> str | None:
        """Sends what an output gives; returns the stop string that it completes."""
        finish = output.finish or {}
        count, matched = find_stop(self.stops, output.token_ids, finish.get("type") == "stop")
        if output.error:
            self._fail(CallErrorCode.INTERNAL, output.error)
        elif self.guide and finish.get("status_code"):
            self._fail(CallErrorCode.INVALID, f"guide: {finish.get('message')}")
        elif matched is not None:
            self.close(FinishReason.STOP, matched, output, count)
        elif output.finish is not None:
            self.close(FinishReason(finish["type"]), finish.get("matched"), output, count)
        elif count:
            self.on_chunk(self._chunk(output, count))
        return matched

    def _fail(self, code: CallErrorCode, reason: str) -> None:
        self.is_closed = True
        self.on_chunk(failed(self.request.call_id, code, reason))

    def _count(self, output: CallOutput, ended: bool) -> None:
        """Counts retractions at the end, and the prompt with the first tokens."""
        if ended:
            num_preempted = max(0, output.num_retractions - self._num_swaps)
            self._counts.preempted += num_preempted
            # SGLang does not tell when: half of the answer is the mean.
            self._counts.preempted_tokens += num_preempted * (self.num_prompt + self.num_tokens // 2)
        if output.token_ids and not self.num_tokens and not self.is_closed:
            self.num_cached = output.num_cached
            self._counts.prompt += self.num_prompt
            self._counts.prefix_hit += self.num_cached

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

    def _chunk(self, output: CallOutput, count: int) -> TokenChunk:
        """The first `count` tokens of an output."""
        logprobs = np.array(output.logprobs[:count], np.float32)
        spans = version_spans(self._versions, self.num_tokens, count)
        self.num_tokens += count
        self._counts.generated += count
        self._counts.nonfinite += count - int(np.count_nonzero(np.isfinite(logprobs)))
        if self._keeps_kv:
            first = self._versions[0][0]
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
