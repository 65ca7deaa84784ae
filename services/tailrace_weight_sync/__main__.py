"""The weight_sync process: wires Redis, shared memory, ZMQ and NATS together."""

import asyncio
import os
from pathlib import Path

from tailrace.log import get_logger
from tailrace.runtime import Args, Service, run_service
from tailrace.store import connect
from tailrace.weights.target_types import TARGETS
from tailrace_protos import subjects
from tailrace_protos.weights import (
    BroadcastRequest,
    CurrentWeightsRequest,
    OfferWeights,
    RouteRequest,
    WeightManifest,
    WeightsApplied,
    WeightsAvailable,
)
from tailrace_weight_sync import metrics
from tailrace_weight_sync.adapters.broadcaster import Broadcaster
from tailrace_weight_sync.adapters.redis_versions import RedisVersions
from tailrace_weight_sync.adapters.segment_vault import SegmentVault
from tailrace_weight_sync.adapters.snapshot_file import SnapshotFile
from tailrace_weight_sync.adapters.targets import TargetVersions
from tailrace_weight_sync.config import WeightSyncConfig
from tailrace_weight_sync.core.catalogue import BaseNotHeldError, Catalogue
from tailrace_weight_sync.handlers import WeightSync

log = get_logger(__name__)


class _Process:
    """Parts of a running weight_sync, and the order in which they start and stop."""

    def __init__(self, args: Args) -> None:
        self.config = args.section("weight_sync", WeightSyncConfig)
        self.run = args.run.exp_name
        self.redis_url = args.endpoints.redis_url
        state_dir = Path(os.environ.get("TAILRACE_STATE_DIR", "") or args.run.run_dir / "state")
        self.snapshot = SnapshotFile(state_dir / "weight_sync" / f"{self.run}.weights")
        self.base_snapshot = SnapshotFile(state_dir / "weight_sync" / f"{self.run}.base.weights")
        self.saved_base = -1  # policy version in `base_snapshot`
        self.service = Service("weight_sync", args.run, args.endpoints, instance_id=args.instance_id)
        self.vault = self.make_vault(args.endpoints.host_id)
        self.targets = {
            target: TargetVersions(
                target, self.make_vault(args.endpoints.host_id, target), self.vault.buffer
            )
            for target in TARGETS
        }
        self.catalogue = Catalogue(self.config.keep_versions)
        self.service.on_start(self.start)

    def make_vault(self, host_id: str, target: str = "") -> SegmentVault:
        """Vault of published versions, or of those in a declared type."""
        return SegmentVault(
            self.run,
            host_id,
            bind_host=self.config.bind_host,
            advertise_host=self.config.advertise_host,
            max_delta_share=self.config.max_delta_share,
            volume=Path(self.config.volume) / self.run if self.config.transport == "files" else None,
            target=target,
        )

    async def start(self) -> None:
        """Recovers earlier versions, then listens."""
        service, run = self.service, self.run
        redis = await connect(self.redis_url)
        service.on_drain(redis.aclose)
        await self.vault.start()
        for versions_as in self.targets.values():
            await versions_as.start()
        service.on_drain(self.leave)
        versions = RedisVersions(redis, run)
        broadcasts = self.config.transport == "broadcast"
        if broadcasts:
            await self.start_broadcaster()
        self.sync = WeightSync(
            self.catalogue,
            self.vault,
            versions,
            self.announce,
            targets=self.targets,
            relays=self.config.relays,
            broadcasts=broadcasts,
        )
        await self.recover(await versions.lineages())
        service.endpoint(subjects.offer_weights(run), OfferWeights, self.sync.take, mailbox=8)
        service.endpoint(subjects.current_weights(run), CurrentWeightsRequest, self.sync.current)
        service.endpoint(subjects.weights_applied(run), WeightsApplied, self.sync.applied)
        service.endpoint(
            subjects.weight_route(run),
            RouteRequest,
            self.sync.route,
            mailbox=8192,
            concurrency=8192,
        )
        service.loop("announce", self.announce_often)
        service.loop("repair", self.sync.repair_often)
        if self.config.snapshot_interval_s > 0:
            service.loop("snapshot", self.snapshot_often)

    async def start_broadcaster(self) -> None:
        """Answers servers that ask for a place in a broadcast."""
        broadcaster = Broadcaster(
            self.vault.buffer,
            bind_host=self.config.bind_host,
            advertise_host=self.config.advertise_host,
            timeout_s=self.config.broadcast_timeout_s,
        )
        await broadcaster.start()
        self.service.on_drain(broadcaster.stop)
        self.service.endpoint(
            subjects.weight_broadcast(self.run),
            BroadcastRequest,
            broadcaster.join,
            mailbox=8192,
            concurrency=8192,
        )

    async def announce(self, available: WeightsAvailable) -> None:
        """Announces a version to all inference servers."""
        await self.service.bus.publish(subjects.weights_published(self.run), available)

    async def recover(self, lineages: frozenset[str]) -> None:
        """Holds the versions of a killed predecessor again, if Redis knows their lineage."""
        adopted = await self.vault.adopt(lineages)
        for manifest in sorted(adopted, key=lambda manifest: manifest.policy_version):
            await self.hold_again(manifest)
        for snapshot in (self.base_snapshot, self.snapshot):
            saved = await asyncio.to_thread(snapshot.load)
            if saved is None:
                continue
            manifest, data = saved
            is_newer = manifest.policy_version >= self.catalogue.next_version
            if is_newer and manifest.lineage in lineages and await self.vault.restore(manifest, data):
                await self.hold_again(manifest)

    async def hold_again(self, manifest: WeightManifest) -> None:
        """Holds a recovered version; drops adapters without their base, which no server can use."""
        try:
            self.catalogue.base_of(manifest)
        except BaseNotHeldError as error:
            log.warning("adapters dropped", policy_version=manifest.policy_version, error=str(error))
            self.vault.drop(manifest.policy_version)
        else:
            await self.sync.hold(manifest)

    async def announce_often(self) -> None:
        """Repeats announcements for servers that missed one."""
        while True:
            await self.sync.announce_newest()
            await asyncio.sleep(self.config.announce_interval_s)

    async def snapshot_often(self) -> None:
        """Writes new versions to the snapshot file."""
        while True:
            await self.sync.published.wait()
            await self.save_newest()
            await asyncio.sleep(self.config.snapshot_interval_s)

    async def save_newest(self) -> None:
        """Writes the newest version to the state directory; logs and counts a full disk."""
        self.sync.published.clear()
        newest = self.catalogue.newest
        data = None if newest is None else self.vault.buffer(newest.policy_version)
        if newest is None or data is None:
            return
        try:
            await self.save_base(newest)
            await asyncio.to_thread(self.snapshot.save, newest, data)
        except OSError as error:
            self.sync.published.set()  # tried again after the interval
            metrics.FAILED_SNAPSHOTS.inc()
            log.error("snapshot not saved: free space", path=str(self.snapshot.path), error=str(error))

    async def save_base(self, newest: WeightManifest) -> None:
        """Writes the base of the newest version, once."""
        base = self.catalogue.base_of(newest)
        data = None if base is None else self.vault.buffer(base.policy_version)
        if base is not None and data is not None and base.policy_version != self.saved_base:
            await asyncio.to_thread(self.base_snapshot.save, base, data)
            self.saved_base = base.policy_version

    async def leave(self) -> None:
        """Saves the newest version and frees all memory."""
        if self.config.snapshot_interval_s > 0 and self.sync.published.is_set():
            await self.save_newest()
        await self.vault.stop(delete=True)
        for versions in self.targets.values():
            await versions.stop()


def build(args: Args) -> Service:
    """Builds the service without starting it."""
    return _Process(args).service


def main() -> int:
    """Runs until a signal stops the service; returns the exit code."""
    return run_service(build)


if __name__ == "__main__":
    raise SystemExit(main())
