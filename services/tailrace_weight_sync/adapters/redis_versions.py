"""Policy versions in Redis, with their events in the outbox."""

import asyncio

from tailrace.store import Outbox, StoreConnection, Versions
from tailrace_protos.event import ServerWeightsApplied, WeightsPublished
from tailrace_protos.weights import WeightManifest, WeightsApplied

_SERVICE = "weight_sync"
_REPEATS_WITHIN_S = 24 * 3600


class RedisVersions:
    """Assigns policy versions; emits each `WeightsPublished` and `ServerWeightsApplied` once."""

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._versions = Versions(redis, run)
        self._outbox = Outbox(redis, run)

    async def allocate(self, lineage: str, optimizer_step: int, at_least: int) -> int:
        """Assigns an unused policy version; a repeated step gets the version that it has."""
        return await self._versions.allocate(lineage, optimizer_step, at_least=at_least)

    async def record(self, manifest: WeightManifest) -> None:
        """Records a published version; a repetition changes nothing."""
        event = WeightsPublished(
            policy_version=manifest.policy_version,
            lineage=manifest.lineage,
            optimizer_step=manifest.optimizer_step,
            num_bytes=manifest.num_bytes,
        )
        once = f"published/{manifest.policy_version}"
        await asyncio.gather(
            self._versions.record(manifest),
            self._outbox.emit(_SERVICE, event, once=once, once_s=_REPEATS_WITHIN_S),
        )

    async def record_applied(self, report: WeightsApplied) -> None:
        """Records that a server serves a version. Reports with equal timings are repetitions."""
        event = ServerWeightsApplied(
            server_id=report.server_id, policy_version=report.policy_version, swap_s=report.swap_s
        )
        timings = f"{report.fetch_s!r}/{report.stage_s!r}/{report.swap_s!r}"
        once = f"applied/{report.server_id}/{report.policy_version}/{timings}"
        await self._outbox.emit(_SERVICE, event, once=once, once_s=_REPEATS_WITHIN_S)

    async def lineages(self) -> frozenset[str]:
        """Lineages that published in this run."""
        return frozenset(lineage for lineage, _ in (await self._versions.all()).values())
