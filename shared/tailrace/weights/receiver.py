"""Inference server's side: fetches versions during generation, reports their application."""

import asyncio
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tailrace.bus import Bus, BusError
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.weights.chunks import ChunkFetch
from tailrace.weights.copying import bulk, open_source
from tailrace.weights.deltas import apply_deltas
from tailrace.weights.errors import ChecksumError, WeightsGoneError
from tailrace.weights.segment import map_segment
from tailrace.weights.tensors import TensorBytes, check_manifest, verify, views
from tailrace_protos import subjects
from tailrace_protos.weights import (
    CurrentWeightsReply,
    CurrentWeightsRequest,
    ReportKept,
    WeightDelta,
    WeightManifest,
    WeightsApplied,
    WeightsAvailable,
    WeightSource,
)

log = get_logger(__name__)

_MAX_UNREPORTED = 256


class _Baseline(NamedTuple):
    """Bytes of a version, from which deltas lead to later ones."""

    policy_version: int
    data: memoryview


class StagedWeights:
    """Verified bytes of a version. Its tensors are views, readable as long as they are referenced."""

    def __init__(self, manifest: WeightManifest, buffer: memoryview, num_fetched: int) -> None:
        self.manifest = manifest
        self.num_fetched = num_fetched  # bytes that came over the network
        self._buffer: memoryview | None = buffer

    @property
    def buffer(self) -> memoryview:
        """All bytes of the version."""
        assert self._buffer is not None, "closed"
        return self._buffer

    def tensors(self) -> Iterator[TensorBytes]:
        """Tensors in the order of the manifest."""
        return views(self.manifest, self.buffer)

    def close(self) -> None:
        """Releases the bytes; the memory is freed with the last view."""
        self._buffer = None


class WeightReceiver:
    """Fetches weights for one inference server."""

    def __init__(
        self, bus: Bus, run: str, host_id: str, server_id: str, *, shm_folder: Path | None = None
    ) -> None:
        self._bus = bus
        self._run = run
        self._host_id = host_id
        self._server_id = server_id
        self._shm_folder = shm_folder
        self._unreported: deque[WeightsApplied] = deque(maxlen=_MAX_UNREPORTED)
        self._reporting: asyncio.Task[None] | None = None
        self._fetched: _Baseline | None = None  # over the network; the next baseline once it is applied
        self._baseline: _Baseline | None = None

    async def current(self, *, attempts: int = 60) -> WeightsAvailable | None:
        """The newest published version, None before the first; waits while weight_sync is down."""
        reply = await self._bus.request(
            subjects.current_weights(self._run),
            CurrentWeightsRequest(self._server_id),
            CurrentWeightsReply,
            timeout_s=5.0,
            idempotent_retries=attempts - 1,
        )
        return reply.available

    async def fetch(self, available: WeightsAvailable) -> StagedWeights:
        """Fetches and verifies a version: mapped on the same host, else pulled over ZMQ.

        If the version that this server applied last is known byte for byte, only the differences are
        pulled; whatever is wrong with them, the whole version is.

        Raises `ChecksumError`, `ManifestError`, `WeightsGoneError` or `WeightsUnreachableError`;
        the active version is unchanged then.
        """
        manifest, source = available.manifest, available.source
        check_manifest(manifest)
        fd = open_source(manifest, source, self._host_id, self._shm_folder)
        if fd is not None:
            buffer = map_segment(fd, manifest.num_bytes)
            await bulk(manifest.num_bytes, verify, manifest, buffer)
            return StagedWeights(manifest, buffer, 0)
        staged = await self._pull_deltas(available) or await self._pull(manifest, source)
        if available.keep_baseline:
            self._fetched = _Baseline(manifest.policy_version, staged.buffer)
        return staged

    async def _pull(self, manifest: WeightManifest, source: WeightSource) -> StagedWeights:
        buffer = memoryview(bytearray(manifest.num_bytes))
        await ChunkFetch(source, manifest.policy_version, buffer).run()
        await bulk(manifest.num_bytes, verify, manifest, buffer)
        return StagedWeights(manifest, buffer, manifest.num_bytes)

    async def _pull_deltas(self, available: WeightsAvailable) -> StagedWeights | None:
        """Builds the version from the baseline; None without usable deltas."""
        manifest, baseline = available.manifest, self._baseline
        starts = [delta.from_version for delta in available.deltas]
        if baseline is None or baseline.policy_version not in starts:
            return None
        chain: list[tuple[WeightDelta, memoryview]] = []
        try:
            for delta in available.deltas[starts.index(baseline.policy_version) :]:
                payload = memoryview(bytearray(delta.num_bytes))
                fetch = ChunkFetch(available.source, delta.policy_version, payload, is_delta=True)
                await fetch.run()
                chain.append((delta, payload))
            data = baseline.data
            buffer = await bulk(manifest.num_bytes, apply_deltas, manifest, chain, data)
        except (ChecksumError, WeightsGoneError) as error:
            log.warning("differences not used: the whole version is fetched", error=str(error))
            return None
        return StagedWeights(manifest, buffer, sum(payload.nbytes for _, payload in chain))

    async def report(self, applied: WeightsApplied) -> None:
        """Reports a version to weight_sync. Returns at once; the report is repeated until an answer."""
        fetched = self._fetched
        if not applied.error and fetched is not None:
            is_this = fetched.policy_version == applied.policy_version
            self._baseline, self._fetched = (fetched, None) if is_this else (None, fetched)
        self._unreported.append(applied)
        if self._reporting is None or self._reporting.done():
            self._reporting = asyncio.create_task(self._deliver(), name="weight-reports")

    async def close(self) -> None:
        """Drops reports without an answer of weight_sync."""
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
