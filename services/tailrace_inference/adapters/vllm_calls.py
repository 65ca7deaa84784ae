"""One call in vLLM's terms: its sampling parameters, and chunks of what vLLM gives back."""

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from vllm import SamplingParams as VllmSampling
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.metrics.loggers import StatLoggerBase

from tailrace_inference.adapters.vllm_guides import GuidedSampling
from tailrace_inference.adapters.vllm_release import EPISODE
from tailrace_inference.core.calls import CallCounts
from tailrace_inference.engine.stops import StopStrings
from tailrace_inference.ports import OnChunk
from tailrace_protos.base import EMPTY, pack_float32, pack_int32
from tailrace_protos.generation import GenerateRequest, TokenChunk, TokenSpan

STREAM_TOKENS = 4  # tokens of one output of vLLM; fewer cost more than a small model's step
_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(slots=True, eq=False)
class VllmCall:
    """One call from `submit` to its last chunk."""

    request: GenerateRequest
    on_chunk: OnChunk
    num_prompt: int
    max_new: int
    stops: StopStrings | None
    born_version: int  # active at `submit`
    vocab_size: int = 0
    stream_tokens: int = STREAM_TOKENS  # of one output
    num_sent: int = 0
    guide: str = ""  # `GuideSpec`
    is_aborted: bool = False
    internal_id: str = ""  # vLLM's own

    @property
    def num_tops(self) -> int:
        """Likeliest tokens of a step; vLLM's core dies of more than the vocabulary has."""
        return min(self.request.top_logprobs, self.vocab_size)

    def sampling(self) -> VllmSampling:
        """Parameters of the call."""
        sampling, seed = self.request.sampling, self.request.sampling.seed
        if seed is not None:  # a continued call must not draw the same numbers again
            seed = (seed + self.request.num_continued * _SEED_STEP) % 2**63
        make, more = VllmSampling, {}
        if self.guide:
            make, more = (
                GuidedSampling,
                {"structured_outputs": StructuredOutputsParams(grammar=self.guide)},
            )
        return make(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            seed=seed,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            max_tokens=self.max_new,
            logprobs=self.num_tops,
            flat_logprobs=True,
            detokenize=False,
            skip_clone=True,
            extra_args={EPISODE: self.request.episode_id},
            output_kind=RequestOutputKind.DELTA,
            stream_interval=1 if self.stops is not None else self.stream_tokens,
            **more,
        )

    def chunk(
        self, made: Any, count: int, spans: tuple[TokenSpan, ...], counts: CallCounts
    ) -> TokenChunk:
        """Builds a chunk of the first `count` tokens of an output, and counts them."""
        found = made.logprobs
        starts = [] if found is None else found.start_indices[:count]
        logprobs = np.array([found.logprobs[start] for start in starts], np.float32)
        tops, top_logprobs = EMPTY, EMPTY
        width = self.num_tops
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


def queue_s(stats: Any) -> float:
    """Return the seconds that a request waited for its place in the batch; -1: not known."""
    return stats.scheduled_ts - stats.queued_ts if stats and stats.scheduled_ts else -1.0


class SchedulerStats(StatLoggerBase):  # type: ignore[misc]  # vLLM has no types here
    """Counters of vLLM's scheduler, as it reports them after each step."""

    def __init__(self) -> None:
        self.num_running = self.num_steps = self.num_preemptions = 0
        self.num_drafted = self.num_accepted = 0
        self.usage = self.step_s = self.preempted_usage = self.read_usage = 0.0
        self._last_s = 0.0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **_: Any) -> None:
        """See `StatLoggerBase`."""
        if scheduler_stats is not None:
            now_s = time.monotonic()
            if self.num_running:  # the last step left work: this one began at its end
                self.step_s += now_s - self._last_s
            self.num_steps, self._last_s = self.num_steps + 1, now_s
            self.num_running = scheduler_stats.num_running_reqs
            self.usage = scheduler_stats.kv_cache_usage
            self.read_usage += self.usage
            if (speculated := scheduler_stats.spec_decoding_stats) is not None:
                self.num_drafted += speculated.num_draft_tokens
                self.num_accepted += speculated.num_accepted_tokens
        if iteration_stats is not None:
            num_preempted = iteration_stats.num_preempted_reqs
            self.num_preemptions += num_preempted
            # vLLM does not tell their tokens: each counts as one of the mean length of running ones.
            self.preempted_usage += num_preempted * self.usage / max(self.num_running, 1)

    def log_engine_initialized(self) -> None:
        """See `StatLoggerBase`."""
