"""Prometheus metrics of policies."""

from __future__ import annotations

from prometheus_client import Counter

CONTINUED_CALLS = Counter(
    "tailrace_policy_continued_calls", "Generation calls made again after a failure."
)
