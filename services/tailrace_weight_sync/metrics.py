"""Metrics of weight_sync."""

from prometheus_client import Counter, Gauge, Histogram

NEWEST_VERSION = Gauge("tailrace_weight_sync_newest_version", "Newest policy version published.")
HELD_BYTES = Gauge("tailrace_weight_sync_held_bytes", "Bytes of all held versions.")
PUBLISHED_VERSIONS = Counter("tailrace_weight_sync_published_versions", "Versions published.")
REFUSED_OFFERS = Counter("tailrace_weight_sync_refused_offers", "Refused offers.")
TAKE_SECONDS = Histogram(
    "tailrace_weight_sync_take_seconds",
    "Time from the offer of a version to its announcement.",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.2, 1.0, 5.0, 20.0, 60.0, 300.0),
)
DELTA_SECONDS = Histogram(
    "tailrace_weight_sync_delta_seconds",
    "Time to compute the differences to the version before; part of the time until the announcement.",
    buckets=(0.002, 0.01, 0.05, 0.2, 1.0, 5.0, 20.0, 60.0),
)
CONVERT_SECONDS = Histogram(
    "tailrace_weight_sync_convert_seconds",
    "Time to convert a version to a type that servers declare.",
    ["target"],
    buckets=(0.002, 0.01, 0.05, 0.2, 1.0, 5.0, 20.0, 60.0),
)
APPLIED_VERSIONS = Counter(
    "tailrace_weight_sync_applied_versions",
    "Versions that inference servers applied, by outcome.",
    ["outcome"],
)
REPAIRED_VERSIONS = Counter(
    "tailrace_weight_sync_repaired_versions",
    "Versions whose bytes changed in memory and were copied again from the learner.",
)
FAILED_SNAPSHOTS = Counter(
    "tailrace_weight_sync_failed_snapshots", "Snapshots that could not be written."
)
FAILED_FILES = Counter(
    "tailrace_weight_sync_failed_files", "Versions that could not be written to the volume."
)
ROUTES = Counter(
    "tailrace_weight_sync_routes", "Holders named to servers that fetch, by kind of holder.", ["holder"]
)
FAILED_HOLDERS = Counter(
    "tailrace_weight_sync_failed_holders", "Servers that sent nothing to those that fetched from them."
)
BROADCASTS = Counter(
    "tailrace_weight_sync_broadcasts", "Broadcasts to groups of servers, by outcome.", ["outcome"]
)
BROADCAST_SECONDS = Histogram(
    "tailrace_weight_sync_broadcast_seconds",
    "Time of a broadcast, with the making of a new group.",
    buckets=(0.005, 0.02, 0.1, 0.5, 2.0, 5.0, 20.0, 60.0),
)
