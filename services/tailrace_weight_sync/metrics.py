"""What weight_sync measures."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

NEWEST_VERSION = Gauge("tailrace_weight_sync_newest_version", "Newest policy version published.")
HELD_BYTES = Gauge("tailrace_weight_sync_held_bytes", "Bytes of all versions held.")
PUBLISHED_VERSIONS = Counter("tailrace_weight_sync_published_versions", "Versions published.")
REFUSED_OFFERS = Counter("tailrace_weight_sync_refused_offers", "Offers that could not be taken.")
TAKE_SECONDS = Histogram(
    "tailrace_weight_sync_take_seconds",
    "Offer received to version announced.",
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.2, 1.0, 5.0, 20.0, 60.0, 300.0),
)
APPLIED_VERSIONS = Counter(
    "tailrace_weight_sync_applied_versions", "Reports of inference servers, by outcome.", ["outcome"]
)
FAILED_SNAPSHOTS = Counter(
    "tailrace_weight_sync_failed_snapshots", "Snapshots that the state directory did not take."
)
