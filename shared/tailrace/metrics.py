"""Prometheus metrics of the shared layers; those of a service are in its `metrics.py`.

Names: `tailrace_<layer>_<quantity>_<unit>`. Label `actor` is `<kind>:<subject or durable or name>`.
"""

from prometheus_client import Counter, Gauge, Histogram

_SECONDS = (0.0005, 0.002, 0.01, 0.05, 0.2, 1.0, 5.0, 20.0, 60.0, 300.0)

HANDLED = Counter(
    "tailrace_runtime_handled",
    "Messages an actor finished, by outcome "
    "(ok, failed, malformed, rejected, handed_back, left, dead).",
    ["actor", "outcome"],
)
HANDLER_SECONDS = Histogram(
    "tailrace_runtime_handler_seconds", "Time a handler took.", ["actor"], buckets=_SECONDS
)
MAILBOX_MESSAGES = Gauge(
    "tailrace_runtime_mailbox_messages", "Messages waiting in a mailbox.", ["actor"]
)
RUNNING_HANDLERS = Gauge("tailrace_runtime_running_handlers", "Handlers running now.", ["actor"])
FAILURES = Counter(
    "tailrace_runtime_failures",
    "Unexpected exceptions, by place and exception type.",
    ["where", "error"],
)
LOOP_DELAY_SECONDS = Histogram(
    "tailrace_runtime_event_loop_delay_seconds",
    "Lateness of a timer, four times a second: work that blocks the event loop makes it late.",
    buckets=(0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1.0, 5.0, 20.0),
)
WORST_LOOP_DELAY_SECONDS = Gauge(
    "tailrace_runtime_event_loop_worst_delay_seconds",
    "Greatest lateness of that timer since the process started.",
)
SPANS = Counter(
    "tailrace_tracing_spans",
    "Finished spans, or traces of MLflow, by receiver (otlp, mlflow) and result: sent, dropped for "
    "a full queue or beyond `tracing.mlflow_per_minute`, failed at the receiver.",
    ["receiver", "result"],
)
QUEUED_SPANS = Gauge(
    "tailrace_tracing_queued_spans", "Spans or traces that wait for a receiver.", ["receiver"]
)
READY = Gauge("tailrace_runtime_ready", "1 while the service is ready.")

BUS_CONNECTED = Gauge("tailrace_bus_connected", "1 while connected to NATS.")
BUS_DISCONNECTS = Counter("tailrace_bus_disconnects", "Losses of the connection to NATS.")
BUS_DROPPED = Counter(
    "tailrace_bus_dropped_messages", "Messages lost because a subscription was full.", ["subject"]
)
BUS_ERRORS = Counter(
    "tailrace_bus_errors", "Errors that NATS reported outside a call, by type.", ["error"]
)
BUS_CALL_SECONDS = Histogram("tailrace_bus_call_seconds", "Request to reply.", buckets=_SECONDS)
DEAD_LETTERS = Counter(
    "tailrace_bus_dead_letters", "Messages that no worker could handle, by subject.", ["subject"]
)
BUS_PUBLISH_RETRIES = Counter(
    "tailrace_bus_publish_retries",
    "Durable publishes sent again, by reason (full, unavailable, missing, lost).",
    ["reason"],
)
BUS_UNACKED_PUBLISHES = Gauge(
    "tailrace_bus_unacked_publishes", "Durable publishes without a PubAck yet."
)
