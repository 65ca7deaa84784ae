"""Metrics of the inference service; the engine's counters are read at each scrape."""

from collections.abc import Callable, Iterator

from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0, 20.0)

STEP_SECONDS = Histogram("tailrace_inference_step_seconds", "One step of the engine.", buckets=_SECONDS)
FETCH_SECONDS = Histogram(
    "tailrace_inference_weights_fetch_seconds", "Fetching a policy version.", buckets=_SECONDS
)
STAGE_SECONDS = Histogram(
    "tailrace_inference_weights_stage_seconds",
    "Loading a policy version beside the active one.",
    buckets=_SECONDS,
)
SLEEP_SECONDS = Histogram(
    "tailrace_inference_sleep_seconds",
    "Time without the device, while the learner has it (`colocated: true`).",
    buckets=(0.1, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 300.0),
)
SWAP_SECONDS = Histogram(
    "tailrace_inference_weights_swap_seconds", "Pause in which a policy version becomes active.",
    buckets=_SECONDS,
)  # fmt: skip
FAILED_UPDATES = Counter(
    "tailrace_inference_failed_weight_updates", "Policy versions that could not be applied."
)
LOST_EMISSIONS = Counter(
    "tailrace_inference_lost_emissions", "Chunks that the emission log could not write."
)

GAUGES = {
    "policy_version": "Served policy version (-1: none yet).",
    "capacity_tokens": "Tokens whose keys and values fit into the cache.",
    "used_tokens": "Tokens of cache that running requests hold.",
    "cached_tokens": "Tokens of cache that kept prefixes hold.",
    "num_running": "Requests in the batch.",
    "num_waiting": "Requests that wait for a place.",
}
COUNTERS = {
    "num_steps": ("steps", "Steps of the engine."),
    "num_computed_tokens": ("computed_tokens", "Tokens that went through the model."),
    "num_generated_tokens": ("generated_tokens", "Tokens sampled and sent."),
    "num_prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
    "num_prefix_hit_tokens": ("prefix_hit_tokens", "Prompt tokens found in a kept prefix."),
    "num_recomputed_tokens": (
        "recomputed_tokens", "Tokens computed again after a weight update or a preemption.",
    ),
    "num_stale_kv_tokens": (
        "stale_kv_tokens", "Tokens sampled over keys and values of an older policy version.",
    ),
    "num_preemptions": ("preemptions", "Requests sent back to the queue for lack of cache."),
    "num_drafted_tokens": ("drafted_tokens", "Tokens speculated ahead of the model."),
    "num_accepted_tokens": ("accepted_tokens", "Speculated tokens that the model accepted."),
    "num_finished": ("finished_calls", "Calls that ended with a finish reason."),
    "num_nonfinite_logprobs": (
        "nonfinite_logprobs", "Tokens whose log-probability was not finite; the learner masks them.",
    ),
}  # fmt: skip


class EngineCollector(Collector):
    """Statistics of an engine (`ports.EngineStats`) as metrics `tailrace_inference_<name>`."""

    def __init__(self, stats: Callable[[], object]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        """See `prometheus_client.registry.Collector`."""
        stats = self._stats()
        for field, text in GAUGES.items():
            yield GaugeMetricFamily(f"tailrace_inference_{field}", text, getattr(stats, field))
        for field, (name, text) in COUNTERS.items():
            yield CounterMetricFamily(f"tailrace_inference_{name}", text, getattr(stats, field))
