"""The `autoscaler` section of an experiment file."""

from typing import Literal

import msgspec

from tailrace.config import Config


class ScalingTarget(Config, frozen=True, kw_only=True):
    """One workload whose replicas follow the run: `agents`, `sandbox` or `inference-<pool>`."""

    min_replicas: int = 1
    """Fewest replicas."""

    max_replicas: int = 1
    """Most replicas."""

    episodes_per_replica: int = 64
    """For agents and sandbox: episodes, running and waiting, for each replica."""

    kind: Literal["", "Deployment", "StatefulSet", "LeaderWorkerSet"] = ""
    """Kind of the object. The chart sets it."""

    name: str = ""
    """Name of the object. The chart sets it."""

    def __post_init__(self) -> None:
        if not 0 <= self.min_replicas <= self.max_replicas:
            raise ValueError("min_replicas must be at least 0 and at most max_replicas")
        if self.episodes_per_replica < 1:
            raise ValueError("episodes_per_replica must be at least 1")


class AutoscalerConfig(Config, frozen=True, kw_only=True):
    """Replica counts on Kubernetes. A local cluster has no autoscaler."""

    mode: Literal["metric", "keda", "hpa", "builtin"] = "metric"
    """`metric`: counts are computed and exported, nobody acts. `keda`, `hpa`: these act on the exported
    metric. `builtin`: the autoscaler itself sets replicas. The chart sets it."""

    targets: dict[str, ScalingTarget] = msgspec.field(default_factory=dict)
    """Workloads by name: `agents`, `sandbox`, `inference-<pool>`; others keep their replicas."""

    interval_s: float = 5.0
    """Seconds between two looks."""

    busy_above: float = 0.85
    """Share of time that inference servers are busy above which more help, if the learner waits."""

    busy_below: float = 0.4
    """Share of time that inference servers are busy below which fewer are enough."""

    up_after_s: float = 15.0
    """Seconds for which more replicas must be wanted before they are asked for."""

    down_after_s: float = 180.0
    """Seconds for which fewer replicas must be wanted before any goes."""

    stale_s: float = 20.0
    """Age of the newest status of the run above which all counts are held."""

    dry_run: bool = False
    """With `builtin`: log and count what would be set, and set nothing."""

    def __post_init__(self) -> None:
        for key in ("interval_s", "stale_s"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive")
        for key in ("up_after_s", "down_after_s"):
            if getattr(self, key) < 0:
                raise ValueError(f"{key} must not be negative")
        if not 0 <= self.busy_below < self.busy_above <= 1:
            raise ValueError("busy_below must be less than busy_above, both shares from 0 to 1")
        for name in self.targets:
            if name not in ("agents", "sandbox") and not name.startswith("inference-"):
                raise ValueError(f"targets: {name!r} is not agents, sandbox or inference-<pool>")
