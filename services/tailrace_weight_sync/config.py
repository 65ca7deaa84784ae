"""The `weight_sync` section of an experiment file."""

from __future__ import annotations

from tailrace.config import Config


class WeightSyncConfig(Config, frozen=True, kw_only=True):
    """How versions are kept and handed out."""

    keep_versions: int = 2
    """Newest versions kept in memory. 1 is enough; more spare a slow server a second fetch when a
    version is replaced while it fetches. One more is needed for a moment while a version comes in."""

    announce_interval_s: float = 2.0
    """The newest version is announced again this often, for servers that missed it."""

    snapshot_interval_s: float = 5.0
    """The newest version is written to the state directory at most this often, for late joiners
    after a restart of the host. 0 switches it off."""

    bind_host: str = "127.0.0.1"
    """Address that servers of other hosts fetch weights from (0.0.0.0: all interfaces). Anything but
    loopback switches encryption on."""

    advertise_host: str = ""
    """Name that other hosts reach `bind_host` by; empty: `bind_host`, or this host's name if that is
    0.0.0.0."""

    def __post_init__(self) -> None:
        if self.keep_versions < 1:
            raise ValueError("keep_versions must be at least 1")
        if self.announce_interval_s <= 0:
            raise ValueError("announce_interval_s must be positive")
        if self.snapshot_interval_s < 0:
            raise ValueError("snapshot_interval_s must not be negative")
