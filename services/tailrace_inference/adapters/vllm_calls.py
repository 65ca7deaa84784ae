"""One call in vLLM's terms: its sampling parameters, and chunks of what vLLM gives back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm import SamplingParams as VllmSampling
from vllm.sampling_params import RequestOutputKind

from tailrace_inference.engine.stops import StopStrings
from tailrace_inference.ports import OnChunk
from tailrace_protos.base import EMPTY, pack_float32, pack_int32
from tailrace_protos.generation import GenerateRequest, TokenChunk, TokenSpan

_STREAM_TOKENS = 4  # tokens of one output of vLLM; fewer cost more than the model's step
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class CallCounts:
    """Counters of tokens and calls."""

    generated: int = 0
    prompt: int = 0
    hit: int = 0
    recomputed: int = 0
    stale: int = 0
    finished: int = 0
    nonfinite: int = 0


@dataclass(slots=True, eq=False)
class VllmCall:
    """One call from `submit` to its last chunk."""

    request: GenerateRequest
    on_chunk: OnChunk
    num_prompt: int
    max_new: int
    stops: StopStrings | None
    born_version: int  # active at `submit`
    num_sent: int = 0
    is_aborted: bool = False
    internal_id: str = ""  # vLLM's own

    def sampling(self) -> VllmSampling:
        """Parameters of the call."""
        sampling, seed = self.request.sampling, self.request.sampling.seed
        if seed is not None:  # a continued call must not draw the same numbers again
            seed = (seed + self.request.num_continued * _SEED_STEP) % 2**63
        return VllmSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            max_tokens=self.max_new,
            logprobs=self.request.top_logprobs,
            flat_logprobs=True,
            detokenize=False,
            skip_clone=True,
            output_kind=RequestOutputKind.DELTA,
            stream_interval=1 if self.stops is not None else _STREAM_TOKENS,
        )

    def find_stop(self, ids: Sequence[int], is_stop_id: bool) -> tuple[int, str | None]:
        """Number of new tokens that belong to the answer, and the stop string that ends it.

        `is_stop_id`: the last one is a stop id, which wins over a string that ends with it.
        """
        for place, token in enumerate(ids, 1) if self.stops is not None else ():
            assert self.stops is not None
            found = self.stops.push(token)
            if found is not None:
                return place, None if is_stop_id and place == len(ids) else found
        return len(ids), None

    def spans(self, starts: Sequence[tuple[str, int]], count: int) -> tuple[TokenSpan, ...]:
        """Versions of the next `count` tokens, from vLLM's list of versions and their first tokens."""
        if not count:
            return ()
        first, end = self.num_sent, self.num_sent + count
        bounds = [*(max(start, first) for _, start in starts[1:]), end]
        spans = []
        for (version, _), bound in zip(starts, bounds, strict=True):
            if (size := min(bound, end) - first) > 0:
                spans.append(TokenSpan(int(version), "", size))
                first += size
        return tuple(spans)

    def chunk(
        self, made: Any, count: int, spans: tuple[TokenSpan, ...], vocab_size: int, counts: CallCounts
    ) -> TokenChunk:
        """Builds a chunk of the first `count` tokens of an output, and counts them."""
        found = made.logprobs
        starts = [] if found is None else found.start_indices[:count]
        logprobs = np.array([found.logprobs[start] for start in starts], np.float32)
        tops, top_logprobs = EMPTY, EMPTY
        width = min(self.request.top_logprobs, vocab_size)
        if width and count:
            places = [range(start + 1, start + 1 + width) for start in starts]
            tops = pack_int32([found.token_ids[at] for place in places for at in place])
            top_logprobs = pack_float32([found.logprobs[at] for place in places for at in place])
        self.num_sent += count
        counts.generated += count
        counts.nonfinite += count - int(np.count_nonzero(np.isfinite(logprobs)))
        return TokenChunk(
            self.request.call_id,
            pack_int32(list(made.token_ids)[:count]),
            pack_float32(logprobs),
            spans,
            top_ids=tops,
            top_logprobs=top_logprobs,
        )

    def num_stale(self, spans: tuple[TokenSpan, ...]) -> int:
        """Tokens that were sampled over keys and values of an earlier version, where those are kept."""
        return sum(span.num_tokens for span in spans if span.policy_version != self.born_version)
