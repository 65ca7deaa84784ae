"""Prometheus metrics of the gateway."""

from prometheus_client import Counter, Gauge, Histogram

REQUESTS = Counter("tailrace_gateway_requests", "HTTP requests.", ["route", "status"])
REQUEST_SECONDS = Histogram(
    "tailrace_gateway_request_seconds",
    "Seconds from the start of a request to the end of its response.",
    ["route"],
    buckets=(0.002, 0.005, 0.01, 0.05, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800),
)
ABORTED = Counter("tailrace_gateway_aborted", "Calls whose client disconnected.")
COALESCED = Counter(
    "tailrace_gateway_coalesced", "Retries that joined a call or got its recorded answer."
)
WAITING_RETRIES = Gauge("tailrace_gateway_waiting_retries", "Retries that wait for another replica.")
UNCAPTURED = Counter(
    "tailrace_gateway_uncaptured", "Calls answered but masked: the store did not record them."
)
STALE_READS = Counter(
    "tailrace_gateway_stale_reads", "Calls started from memory while the store was unavailable."
)
CALLS = Gauge("tailrace_gateway_calls", "Model calls in flight.")
SESSIONS = Gauge("tailrace_gateway_sessions", "Sessions in this replica's memory.")
EXPORTED_ROWS = Counter("tailrace_gateway_exported_rows", "Rows exported.")
