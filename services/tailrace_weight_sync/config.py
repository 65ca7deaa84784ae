"""The `weight_sync` section of an experiment file."""

from typing import Literal

from tailrace.config import Config


class WeightSyncConfig(Config, frozen=True, kw_only=True):
    """Storage and distribution of policy versions."""

    keep_versions: int = 2
    """Newest versions kept in memory. 1 is enough. With 2, a slow server does not start again when a
    new version arrives during its fetch. An arriving version needs memory for one more."""

    announce_interval_s: float = 2.0
    """Seconds between two announcements of the newest version, for servers that missed one."""

    snapshot_interval_s: float = 5.0
    """Least seconds between two snapshots of the newest version in the state directory. After a restart
    of the host, new servers start from the snapshot. 0 switches snapshots off."""

    max_delta_share: float = 0.5
    """A server on another host that has an earlier version fetches only the differences, if all of them
    take at most this share of a version's bytes. Such servers keep the bytes of their version in host
    memory. 0 switches differences off."""

    transport: Literal["auto", "files", "broadcast"] = "auto"
    """Way of the weights to the servers. `auto`: shared memory on the same host, ZMQ to others.
    `files`: safetensors files on `volume`. `broadcast`: torch.distributed from weight_sync to all
    servers at once, NCCL if each has a GPU of its own that torch sees, else gloo; it is not encrypted
    and needs torch beside weight_sync. What a server does not get by these goes the way of `auto`."""

    broadcast_timeout_s: float = 5.0
    """With `transport: broadcast`: seconds without progress after which a member counts as dead. The
    others then fetch the version in another way, and the next broadcast has a new group."""

    volume: str = ""
    """Folder for `transport: files`, on a volume that all hosts mount at the same path. It holds
    `keep_versions` versions (and their bases), and one more while the next is written."""

    relays: bool = True
    """Servers on other hosts fetch weights from each other, along a tree: each passes on what it
    receives while it arrives, and keeps its newest version in host memory for servers that join later.
    false: all of them fetch from weight_sync."""

    bind_host: str = "127.0.0.1"
    """Address on which servers of other hosts fetch weights (0.0.0.0: all interfaces). Every address
    but loopback switches encryption on."""

    advertise_host: str = ""
    """Host name under which other hosts reach `bind_host`. Empty: `bind_host`, or this host's name if
    `bind_host` is 0.0.0.0."""

    def __post_init__(self) -> None:
        if self.keep_versions < 1:
            raise ValueError("keep_versions must be at least 1")
        if (self.transport == "files") != bool(self.volume):
            raise ValueError(
                "transport: files needs volume, a folder that all hosts mount at the same path; every "
                "other transport has none"
            )
        if self.broadcast_timeout_s <= 0:
            raise ValueError("broadcast_timeout_s must be positive")
        if not 0.0 <= self.max_delta_share <= 1.0:
            raise ValueError("max_delta_share must be 0 to 1: a share of a version's bytes")
        if self.announce_interval_s <= 0:
            raise ValueError("announce_interval_s must be positive")
        if self.snapshot_interval_s < 0:
            raise ValueError("snapshot_interval_s must not be negative")
