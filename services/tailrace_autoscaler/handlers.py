"""Looks at the run, asks the planner, exports the counts and, with `builtin`, sets them."""

import asyncio
from collections.abc import Awaitable, Callable

from tailrace.clock import Clock
from tailrace.log import get_logger
from tailrace_autoscaler import metrics
from tailrace_autoscaler.config import AutoscalerConfig
from tailrace_autoscaler.core.planner import Planner
from tailrace_autoscaler.core.signals import Signals
from tailrace_autoscaler.ports import Workloads, WorkloadsUnavailableError

log = get_logger(__name__)


class Autoscaler:
    """One run's autoscaler; `workloads` is None where it must not act."""

    def __init__(
        self,
        config: AutoscalerConfig,
        signals: Signals,
        waiting_episodes: Callable[[], Awaitable[int | None]],
        workloads: Workloads | None,
        clock: Clock,
    ) -> None:
        self._config = config
        self._signals = signals
        self._waiting_episodes = waiting_episodes
        self._workloads = workloads
        self._clock = clock
        self._planner = Planner(config)

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await self.look()
            await asyncio.sleep(self._config.interval_s)

    async def look(self) -> None:
        """Look once; an outage of the API or of the run's messages changes nothing."""
        try:
            current = await self._current()
        except WorkloadsUnavailableError as error:
            metrics.HELD.labels("api").inc()
            log.warning("replicas held: no answer of the API", error=str(error))
            return
        waiting = await self._waiting_episodes()
        seen = self._signals.observe(self._clock.monotonic_s(), waiting or 0)
        if self._planner.is_stale(seen) or waiting is None:
            metrics.HELD.labels("status").inc()
            if waiting is None:
                return
        desired = self._planner.plan(seen, current)
        for name, replicas in desired.items():
            metrics.DESIRED.labels(name).set(replicas)
            if name in current and replicas != current[name]:
                await self._set(name, current[name], replicas)

    async def _current(self) -> dict[str, int]:
        if self._workloads is None:
            return {}
        found = {}
        for name, target in self._config.targets.items():
            found[name] = await self._workloads.replicas(target.kind, target.name)
            metrics.OBSERVED.labels(name).set(found[name])
        return found

    async def _set(self, name: str, before: int, replicas: int) -> None:
        target = self._config.targets[name]
        assert self._workloads is not None
        log.info("replicas", target=name, before=before, after=replicas, dry_run=self._config.dry_run)
        metrics.CHANGES.labels(name, "up" if replicas > before else "down").inc()
        if self._config.dry_run:
            return
        try:
            await self._workloads.set_replicas(target.kind, target.name, replicas)
        except WorkloadsUnavailableError as error:
            metrics.HELD.labels("api").inc()
            log.warning("replicas not set", target=name, error=str(error))
