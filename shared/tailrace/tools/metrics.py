"""Prometheus metrics of tools, at the worker and at the caller; `tool` is the tool's name."""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)

CALLS = Counter(
    "tailrace_tool_calls",
    "Calls that ended at this worker, by outcome (ok, an error kind, infra, cancelled).",
    ["tool", "outcome"],
)
CALL_SECONDS = Histogram(
    "tailrace_tool_call_seconds", "Time a call took here.", ["tool"], buckets=_SECONDS
)
REFUSED = Counter(
    "tailrace_tool_refused_calls", "Calls refused because this worker was full.", ["tool"]
)
REPEATED = Counter("tailrace_tool_repeated_calls", "Repeated calls, answered without a second run.")
RUNNING = Gauge("tailrace_tool_running_calls", "Calls running here.")
SESSIONS = Gauge("tailrace_tool_sessions", "Objects of stateful tools here.")
ABANDONED = Gauge(
    "tailrace_tool_abandoned_calls", "Abandoned calls (timeout, cancelled) whose code still runs here."
)
EXPIRED = Counter(
    "tailrace_tool_expired",
    "Calls and sessions of silent callers, by kind (call, session).",
    ["what"],
)

CLIENT_CALLS = Counter(
    "tailrace_tool_client_calls",
    "Calls that ended at their caller, by outcome (ok, an error kind, infra, cancelled).",
    ["tool", "outcome"],
)
CLIENT_SECONDS = Histogram(
    "tailrace_tool_client_call_seconds", "Time a caller waited for a call.", ["tool"], buckets=_SECONDS
)
LOST_WORKERS = Counter("tailrace_tool_lost_workers", "Workers that became silent during calls.")
REDELIVERIES = Counter(
    "tailrace_tool_redeliveries",
    "Idempotent calls sent to another worker after the death of their worker.",
    ["tool"],
)
