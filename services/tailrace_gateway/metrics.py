"""Prometheus metrics of the gateway."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("tailrace_gateway_requests", "HTTP requests answered.", ["route", "status"])
REQUEST_SECONDS = Histogram(
    "tailrace_gateway_request_seconds",
    "Time from a request's body to the end of its answer.",
    ["route"],
    buckets=(0.002, 0.005, 0.01, 0.05, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800),
)
ABORTED = Counter("tailrace_gateway_aborted", "Calls whose client went away.")
COALESCED = Counter("tailrace_gateway_coalesced", "Retries answered by the call that they repeat.")
WAITING_RETRIES = Gauge(
    "tailrace_gateway_waiting_retries", "Retries that wait for a call of another replica."
)
UNCAPTURED = Counter(
    "tailrace_gateway_uncaptured", "Calls answered and masked because they could not be captured."
)
STALE_READS = Counter(
    "tailrace_gateway_stale_reads", "Calls begun from what this replica knows, the store being away."
)
CALLS = Gauge("tailrace_gateway_calls", "Model calls in flight.")
SESSIONS = Gauge("tailrace_gateway_sessions", "Sessions that this replica keeps in memory.")
EXPORTED_ROWS = Counter("tailrace_gateway_exported_rows", "Rows given out by exports.")
