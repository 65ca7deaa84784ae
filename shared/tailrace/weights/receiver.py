"""Inference server's side: fetches versions during generation, reports their application."""

import asyncio
from collections import deque
from pathlib import Path
from typing import NamedTuple

import msgspec

from tailrace.bus import Bus, BusError
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.weights.background import in_background
from tailrace.weights.broadcast import BroadcastMember
from tailrace.weights.chunks import reachable_host
from tailrace.weights.deltas import apply_deltas
from tailrace.weights.errors import (
    ChecksumError,
    TargetTypeError,
    WeightsError,
    WeightsGoneError,
)
from tailrace.weights.mappings import SegmentMappings
from tailrace.weights.relay import WeightRelay
from tailrace.weights.staged import FileWeights, StagedWeights
from tailrace.weights.tensors import check_manifest, verify
from tailrace_protos import subjects
from tailrace_protos.weights import (
    CurrentWeightsReply,
    CurrentWeightsRequest,
    ReportKept,
    WeightDelta,
    WeightsApplied,
    WeightsAvailable,
)

log = get_logger(__name__)

_MAX_UNREPORTED = 256


def _chained(available: WeightsAvailable) -> tuple[int, ...]:
    return tuple(delta.policy_version for delta in available.deltas)


class _Baseline(NamedTuple):
    """Bytes of a version, from which deltas lead to later ones."""

    policy_version: int
    data: memoryview


class WeightReceiver:
    """Fetches weights for one inference server."""

    def __init__(
        self,
        bus: Bus,
        run: str,
        host_id: str,
        server_id: str,
        *,
        shm_folder: Path | None = None,
        target: str = "",
        bind_host: str = "",
        advertise_host: str = "",
    ) -> None:
        """`target`: type that the server declares, see `target_types`; empty: as published.

        `bind_host`, `advertise_host`: address at which it passes weights on, see `WeightRelay`.
        """
        self._bus = bus
        self._run = run
        self._host_id = host_id
        self._server_id = server_id
        self._target = target
        self._fetched_target = ""  # of the version that came last
        self._mappings = SegmentMappings(shm_folder)
        self.relay = WeightRelay(
            bus, run, host_id, server_id, bind_host=bind_host, advertise_host=advertise_host
        )
        own_host = reachable_host(bind_host, advertise_host)
        self.member = BroadcastMember(bus, run, host_id, server_id, own_host)
        self._unreported: deque[WeightsApplied] = deque(maxlen=_MAX_UNREPORTED)
        self._reporting: asyncio.Task[None] | None = None
        self._fetched: _Baseline | None = None  # over the network; the next baseline once it is applied
        self._baseline: _Baseline | None = None

    async def current(self, *, attempts: int = 60) -> WeightsAvailable | None:
        """The newest published version, None before the first; waits while weight_sync is down."""
        reply = await self._bus.request(
            subjects.current_weights(self._run),
            CurrentWeightsRequest(self._server_id, self._target),
            CurrentWeightsReply,
            timeout_s=5.0,
            idempotent_retries=attempts - 1,
        )
        return reply.available

    async def in_own_type(self, announced: WeightsAvailable) -> WeightsAvailable:
        """The announced version, or a newer one, in the type that this server declares.

        Waits while weight_sync converts it; raises `TargetTypeError`.
        """
        if not self._target:
            return announced
        try:
            return await self.current() or announced
        except BusError as error:
            raise TargetTypeError(self._target, str(error)) from error

    async def fetch(self, available: WeightsAvailable) -> StagedWeights:
        """Fetches and verifies a version: read from a volume, received with other servers, mapped on
        the same host, else pulled.

        If the version that this server applied last is known byte for byte, only the differences are
        pulled; whatever is wrong with them, the whole version is.

        Raises `ChecksumError`, `ManifestError`, `WeightsGoneError` or `WeightsUnreachableError`;
        the active version is unchanged then.
        """
        check_manifest(available.manifest)
        self._fetched_target = available.manifest.target
        staged = await self._from_file(available) or await self._from_broadcast(available)
        return staged or await self._from_host(available) or await self._from_network(available)

    async def _from_file(self, available: WeightsAvailable) -> StagedWeights | None:
        manifest, file = available.manifest, available.source.file
        if not file:
            return None
        try:
            return await in_background(FileWeights, manifest, Path(file))
        except (OSError, WeightsError) as error:
            log.warning("weights file not read: fetched otherwise", file=file, error=str(error))
            return None

    async def _from_broadcast(self, available: WeightsAvailable) -> StagedWeights | None:
        manifest = available.manifest
        if not available.broadcasts or manifest.target:  # published versions alone are broadcast
            return None
        received = await self.member.receive(manifest, available.source)
        return None if received is None else StagedWeights(manifest, received, manifest.num_bytes)

    async def _from_host(self, available: WeightsAvailable) -> StagedWeights | None:
        """Maps the shared memory of a publisher on the same host."""
        manifest = available.manifest
        if available.source.host_id != self._host_id or not available.source.shm_name:
            return None
        try:
            buffer = self._mappings.read(available.source.shm_name, manifest.num_bytes)
        except WeightsGoneError as error:
            version = manifest.policy_version
            log.info("weights not in shared memory", policy_version=version, reason=error.reason)
            return None
        await in_background(verify, manifest, buffer)
        return StagedWeights(manifest, buffer, 0)

    async def _from_network(self, available: WeightsAvailable) -> StagedWeights:
        manifest, baseline = available.manifest, self._baseline
        held = None if baseline is None else baseline.policy_version
        self.relay.keep(held, manifest.policy_version, manifest.base_version, *_chained(available))
        staged = await self._pull_deltas(available)
        if staged is None:
            data = await self.relay.fetch_version(available)
            staged = StagedWeights(manifest, data, manifest.num_bytes)
        elif available.relays:
            self.relay.hold(manifest.policy_version, staged.buffer)
        if available.keep_baseline:
            self._fetched = _Baseline(manifest.policy_version, staged.buffer)
        if not available.relays:
            self.relay.keep()
        return staged

    async def _pull_deltas(self, available: WeightsAvailable) -> StagedWeights | None:
        """Builds the version from the baseline; None without usable deltas."""
        manifest, baseline = available.manifest, self._baseline
        starts = [delta.from_version for delta in available.deltas]
        if baseline is None or baseline.policy_version not in starts:
            return None
        chain: list[tuple[WeightDelta, memoryview]] = []
        try:
            for delta in available.deltas[starts.index(baseline.policy_version) :]:
                payload = await self.relay.fetch_delta(available, delta.policy_version, delta.num_bytes)
                chain.append((delta, payload))
            data = baseline.data
            buffer = await in_background(apply_deltas, manifest, chain, data)
        except (ChecksumError, WeightsGoneError) as error:
            log.warning("differences not used: the whole version is fetched", error=str(error))
            for delta, _ in chain:
                self.relay.forget_delta(delta.policy_version)
            return None
        return StagedWeights(manifest, buffer, sum(payload.nbytes for _, payload in chain))

    async def report(self, applied: WeightsApplied) -> None:
        """Reports a version to weight_sync. Returns at once; the report is repeated until an answer."""
        if not applied.error and self.relay.holds(applied.policy_version):
            applied = msgspec.structs.replace(
                applied, relay=self.relay.source, target=self._fetched_target
            )
        fetched = self._fetched
        if not applied.error and fetched is not None:
            is_this = fetched.policy_version == applied.policy_version
            self._baseline, self._fetched = (fetched, None) if is_this else (None, fetched)
        self._unreported.append(applied)
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._deliver(), name="weight-reports")

    async def close(self) -> None:
        """Drops reports without an answer of weight_sync, and stops passing weights on."""
        self.member.close()
        self._mappings.close()
        await self.relay.close()
        if self._reporting is not None and not self._reporting.done():
            self._reporting.cancel()
            await asyncio.wait([self._reporting])

    async def _deliver(self) -> None:
        backoff = Backoff(0.1, 2.0)
        subject = subjects.weights_applied(self._run)
        while self._unreported:
            report = self._unreported[0]
            try:
                await self._bus.request(subject, report, ReportKept, timeout_s=5.0)
            except BusError as error:
                log.warning("weight report not answered", error=str(error))
                await backoff.sleep()
                continue
            if self._unreported and self._unreported[0] is report:
                self._unreported.popleft()
            backoff.reset()
