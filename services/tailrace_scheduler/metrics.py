"""Prometheus metrics of the scheduler."""

from prometheus_client import Counter, Gauge

GROUPS = Gauge(
    "tailrace_scheduler_groups", "Groups that are running, or ready and not trained yet.", ["state"]
)
EPISODES = Gauge("tailrace_scheduler_unsettled_episodes", "Episodes that have not ended.")
BLOCKED = Gauge(
    "tailrace_scheduler_blocked", "1 for the reason that admission waits for now.", ["reason"]
)
HINTS = Gauge("tailrace_scheduler_hint", "1 for every health hint that holds now.", ["name"])
PENDING = Gauge(
    "tailrace_scheduler_pending_decisions",
    "Decisions not carried out yet, by what carries them out.",
    ["lane"],
)
EVENTS = Counter("tailrace_scheduler_relayed_events", "Events written to the log and relayed.")
DECISIONS = Counter("tailrace_scheduler_decisions", "Decisions taken, by kind.", ["kind"])
LEASES = Counter("tailrace_scheduler_leases", "Leases given.")
UNPLACED = Counter("tailrace_scheduler_unplaced_requests", "Lease requests without a server to offer.")
LEASES_HELD = Gauge("tailrace_scheduler_held_leases", "Leases held now.")
REPROVISIONED = Counter(
    "tailrace_scheduler_reprovisioned_streams", "Times the run's streams had vanished."
)
FULL_DISK_WAITS = Counter(
    "tailrace_scheduler_full_disk_waits", "Writes put off because the run directory's disk was full."
)
