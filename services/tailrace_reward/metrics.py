"""Prometheus metrics of the reward service."""

from prometheus_client import Counter, Gauge, Histogram

SCORES = Counter("tailrace_reward_scores", "Episodes scored, by result (ok, failed).", ["result"])
SCORING = Gauge("tailrace_reward_requests_in_scoring", "Requests whose episodes are being scored.")
CALL_SECONDS = Histogram(
    "tailrace_reward_call_seconds",
    "Time that a reward function took, the wait for a process not included.",
    ["function"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60),
)
REPLACED_PROCESSES = Counter(
    "tailrace_reward_replaced_processes",
    "Processes replaced, by cause (timeout, crash, processor_time).",
    ["cause"],
)
JUDGE_RETRIES = Counter(
    "tailrace_reward_judge_retries", "Times that a judge's attempt brought no score.", ["component"]
)
MODEL_ITEMS = Counter("tailrace_reward_model_items", "Conversations that a model scored.", ["model"])
MODEL_BATCHES = Counter("tailrace_reward_model_batches", "Batches that a model computed.", ["model"])
