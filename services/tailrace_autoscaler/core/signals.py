"""Latest observations of a run, put together from its messages (pure; times are given)."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from tailrace_autoscaler.core.planner import Observation
from tailrace_protos.control import RunStatus, ServerStatus

GONE_S = 15.0  # without a heartbeat


@dataclass
class _Reading:
    busy_s: float
    idle_s: float


class Signals:
    """Newest status of the run and of its inference servers."""

    def __init__(self, targets: Iterable[str]) -> None:
        self._targets = [name for name in targets if name.startswith("inference-")]
        self._status: RunStatus | None = None
        self._seen_s = -math.inf
        self._servers: dict[tuple[str, str], tuple[float, ServerStatus]] = {}
        self._before: dict[tuple[str, str], _Reading] = {}

    def on_status(self, status: RunStatus, now_s: float) -> None:
        """Keep the run's status."""
        self._status, self._seen_s = status, now_s

    def on_server(self, status: ServerStatus, now_s: float) -> None:
        """Keep the status of an inference server."""
        self._servers[status.server_id, status.incarnation] = (now_s, status)

    def observe(self, now_s: float, waiting_episodes: int) -> Observation:
        """Returns the state at `now_s`; the busy shares are those since the last call."""
        status = self._status
        if status is None:
            return Observation(now_s, math.inf)
        return Observation(
            now_s=now_s,
            age_s=now_s - self._seen_s,
            phase=status.phase,
            blocked_by=status.blocked_by,
            episodes=status.num_episodes_running + waiting_episodes,
            groups_ready=status.num_groups_ready,
            busy_share=self._busy_shares(now_s),
            num_servers=self._num_servers(),
        )

    def _num_servers(self) -> dict[str, int]:
        found = Counter(self._target_of(server_id) for server_id in {key[0] for key in self._servers})
        return {name: found[name] for name in self._targets}

    def _target_of(self, server_id: str) -> str | None:
        """Target of a server: its pod is `<release>-<target>-<number>`."""
        workload = f"-{server_id.rpartition('-')[0]}"
        return next((name for name in self._targets if workload.endswith(f"-{name}")), None)

    def _busy_shares(self, now_s: float) -> dict[str, float | None]:
        for key in [key for key, (heard_s, _) in self._servers.items() if heard_s < now_s - GONE_S]:
            del self._servers[key]
        sums = {name: _Reading(0.0, 0.0) for name in self._targets}
        for key, (_, server) in self._servers.items():
            before = self._before.get(key, _Reading(server.busy_s, server.idle_s))
            target = self._target_of(key[0])
            if target is not None:
                sums[target].busy_s += max(server.busy_s - before.busy_s, 0.0)
                sums[target].idle_s += max(server.idle_s - before.idle_s, 0.0)
        self._before = {
            key: _Reading(each.busy_s, each.idle_s) for key, (_, each) in self._servers.items()
        }
        return {
            name: each.busy_s / total if (total := each.busy_s + each.idle_s) > 0 else None
            for name, each in sums.items()
        }
