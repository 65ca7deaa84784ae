"""Prometheus metrics of policies."""

from prometheus_client import Counter

CONTINUED_CALLS = Counter(
    "tailrace_policy_continued_calls", "Generation calls made again after a failure."
)
