"""Desired replicas from observations of a run.

Invariants: a count stays within its bounds; it rises only after it was wanted higher for `up_after_s`,
and falls only to the highest count wanted during `down_after_s`, so that a short lull or burst moves
nothing; inference servers change by one at a time; without a fresh observation nothing changes; a
target whose replicas nobody tells has no count until it was observed for `up_after_s`, so that a new
planner begins with what is there.

Agents and sandboxes follow the episodes, running and waiting. Inference servers follow the learner:
more while it waits for groups and the servers are busy, fewer while groups wait for it or servers idle.
A server that was asked for is awaited before the next: its pod may be pending, or load the model.
With `min_replicas` 0 the last one goes once no episode needs it, and comes back for the next.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

from tailrace_autoscaler.config import AutoscalerConfig, ScalingTarget

_TRAINS = "training"
_FULL = ("buffer", "credit")  # admission waits for the learner


@dataclass(frozen=True)
class Observation:
    """State of the run as seen at `now_s` (monotonic)."""

    now_s: float
    age_s: float  # of the newest status of the run; infinite before the first
    phase: str = ""
    blocked_by: str = ""
    episodes: int = 0  # running and waiting
    groups_ready: int = 0
    busy_share: Mapping[str, float | None] | None = None  # by inference target; None: not known yet
    num_servers: Mapping[str, int] | None = None  # that live, by inference target


class _Memory:
    """Counts wanted for one target, as long as they matter."""

    def __init__(self, config: AutoscalerConfig) -> None:
        self._up_s, self._down_s = config.up_after_s, config.down_after_s
        self._wanted: deque[tuple[float, int]] = deque()
        self._since_s: float | None = None

    def settle(self, now_s: float, current: int, wanted: int) -> int:
        """The count to set, which is `current` until another was wanted long enough."""
        self._wanted.append((now_s, wanted))
        while self._wanted[0][0] < now_s - max(self._up_s, self._down_s):
            self._wanted.popleft()
        waited_s = self._waited_s(now_s)
        if wanted > current and waited_s >= self._up_s:
            return max(current, min(self._within(now_s - self._up_s)))
        if wanted < current and waited_s >= self._down_s:
            return min(current, max(self._within(now_s - self._down_s)))
        return current

    def is_settled(self, now_s: float) -> bool:
        """Tell whether a count may rise by now."""
        return self._waited_s(now_s) >= self._up_s

    def _waited_s(self, now_s: float) -> float:
        if self._since_s is None:
            self._since_s = now_s
        return now_s - self._since_s

    def _within(self, from_s: float) -> list[int]:
        return [count for time_s, count in self._wanted if time_s >= from_s]

    def restart(self, now_s: float) -> None:
        """Forget, after a change: its effect is not seen yet."""
        self._wanted.clear()
        self._since_s = now_s


class Planner:
    """Keeps the desired replicas of every target."""

    def __init__(self, config: AutoscalerConfig) -> None:
        self._config = config
        self._memory = {name: _Memory(config) for name in config.targets}
        self.desired: dict[str, int] = {}

    def is_stale(self, seen: Observation) -> bool:
        """True if the observation is too old to decide on."""
        return seen.age_s > self._config.stale_s

    def plan(self, seen: Observation, current: Mapping[str, int]) -> dict[str, int]:
        """Desired replicas by target; `current`: those that are set, where they are known."""
        for name, target in self._config.targets.items():
            memory, now = self._memory[name], current.get(name, self.desired.get(name))
            if self.is_stale(seen):
                memory.restart(seen.now_s)
            elif now is None:
                now = self._first(name, target, seen) if memory.is_settled(seen.now_s) else None
            else:
                now = self._next(name, target, seen, now)
            if now is not None:
                self.desired[name] = now
        return dict(self.desired)

    def _first(self, name: str, target: ScalingTarget, seen: Observation) -> int:
        """Count of a target that nobody tells: servers that live, or what is wanted of others."""
        if name.startswith("inference-"):
            return _bounded(target, (seen.num_servers or {}).get(name, 0))
        return _bounded(target, self._wanted(name, target, seen, 0))

    def _next(self, name: str, target: ScalingTarget, seen: Observation, now: int) -> int:
        bounded = _bounded(target, self._wanted(name, target, seen, now))
        chosen = _bounded(target, self._memory[name].settle(seen.now_s, now, bounded))
        if chosen != now:
            self._memory[name].restart(seen.now_s)
        return chosen

    def _wanted(self, name: str, target: ScalingTarget, seen: Observation, now: int) -> int:
        if not name.startswith("inference-"):
            return -(-seen.episodes // target.episodes_per_replica)
        if not now:  # nobody reports a busy share
            return int(bool(seen.episodes) or not seen.groups_ready)
        busy = (seen.busy_share or {}).get(name)
        return now if busy is None else self._wanted_servers(name, seen, now, busy)

    def _wanted_servers(self, name: str, seen: Observation, now: int, busy: float) -> int:
        """Servers that are wanted where they report this busy share."""
        fewest = int(bool(seen.episodes))  # the last server stays while episodes need it
        if seen.phase == _TRAINS and seen.blocked_by in _FULL and seen.groups_ready > 0:
            return max(now - 1, fewest)  # the learner is slower: its servers' GPUs serve others better
        if busy > self._config.busy_above and seen.groups_ready == 0:
            all_live = (seen.num_servers or {}).get(name, now) >= now  # else one still loads the model
            return now + 1 if all_live else now
        return max(now - 1, fewest) if busy < self._config.busy_below else now


def _bounded(target: ScalingTarget, replicas: int) -> int:
    return min(max(replicas, target.min_replicas), target.max_replicas)
