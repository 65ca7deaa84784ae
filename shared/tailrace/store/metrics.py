"""What the store measures."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

WAITING_COMMANDS = Gauge("tailrace_store_waiting_commands", "Commands not sent to Redis yet.")
BATCH_COMMANDS = Histogram(
    "tailrace_store_batch_commands",
    "Commands that shared one round trip.",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
)
BATCH_SECONDS = Histogram(
    "tailrace_store_batch_seconds",
    "One round trip of a batch.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.2, 1.0, 5.0, 30.0),
)
LOST_CONNECTIONS = Counter("tailrace_store_lost_connections", "Times that Redis went away.")
REFUSED_COMMANDS = Counter(
    "tailrace_store_refused_commands", "Commands that Redis refused, by error.", ["error"]
)
