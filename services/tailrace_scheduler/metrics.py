"""Prometheus metrics of the scheduler."""

from collections.abc import Mapping

from prometheus_client import Counter, Gauge

GROUPS = Gauge(
    "tailrace_scheduler_groups", "Groups that are running, or ready and not trained yet.", ["state"]
)
SERVERS = Gauge("tailrace_scheduler_servers", "Inference servers that can get episodes.")
STEP_METRIC = Gauge(
    "tailrace_scheduler_step_metric", "Newest known value of a key of `metrics.jsonl`.", ["name"]
)
MAX_STALENESS = Gauge("tailrace_scheduler_max_staleness", "The experiment's `max_staleness`.")
FREE_DISK = Gauge("tailrace_scheduler_free_disk_bytes", "Free bytes under the run directory.")
EPISODES = Gauge(
    "tailrace_scheduler_unsettled_episodes", "Published episodes that have not ended: queued or played."
)
WAITING = Gauge("tailrace_scheduler_waiting_episodes", "Episodes that wait for their first server.")
BLOCKED = Gauge(
    "tailrace_scheduler_blocked", "1 for the reason that admission waits for now.", ["reason"]
)
HINTS = Gauge("tailrace_scheduler_hint", "1 for every health hint that holds now.", ["name"])
PENDING = Gauge(
    "tailrace_scheduler_pending_decisions",
    "Decisions not carried out yet, by what carries them out.",
    ["lane"],
)
LAGGING = Gauge(
    "tailrace_scheduler_lagging_servers", "Servers without new episodes, since their weights are old."
)
EVENTS = Counter("tailrace_scheduler_relayed_events", "Events written to the log and relayed.")
DECISIONS = Counter("tailrace_scheduler_decisions", "Decisions taken, by kind.", ["kind"])
LEASES = Counter("tailrace_scheduler_leases", "Leases given.")
UNPLACED = Counter("tailrace_scheduler_unplaced_requests", "Lease requests that were given no server.")
LEASES_HELD = Gauge("tailrace_scheduler_held_leases", "Leases held now.")
REPROVISIONED = Counter(
    "tailrace_scheduler_reprovisioned_streams", "Times the run's streams had vanished."
)
FULL_DISK_WAITS = Counter(
    "tailrace_scheduler_full_disk_waits", "Writes put off because the run directory's disk was full."
)


def show(row: Mapping[str, float | None]) -> None:
    """Exports the known numbers of a row of `metrics.jsonl`."""
    for name, value in row.items():
        if value is not None:
            STEP_METRIC.labels(name).set(value)
