"""Prometheus metrics of the sandbox service."""

from prometheus_client import Counter, Gauge, Histogram

CALLS = Counter(
    "tailrace_sandbox_calls",
    "Calls by tool and result (ok, failed, or the limit that ended them).",
    ["tool", "result"],
)
CALL_SECONDS = Histogram(
    "tailrace_sandbox_call_seconds",
    "Time of a call, the wait for a free process not included.",
    ["tool"],
    buckets=(0.002, 0.005, 0.01, 0.05, 0.2, 1, 5, 20, 60),
)
SESSIONS = Gauge("tailrace_sandbox_sessions", "Sessions that are open.")
TIER = Gauge("tailrace_sandbox_tier", "1 for the tier of confinement in use.", ["tier"])
MEMORY_LIMIT = Gauge(
    "tailrace_sandbox_memory_limit",
    "1 for what limits the memory of calls (cgroup, or the checks of the zygotes).",
    ["by"],
)
LOST_ZYGOTES = Counter(
    "tailrace_sandbox_lost_zygotes", "Processes replaced because they ended by themselves."
)
