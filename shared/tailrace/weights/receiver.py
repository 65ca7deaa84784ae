"""Inference server's side: fetches versions during generation, reports their application."""

import asyncio
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from tailrace.bus import Bus, BusError
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.weights.chunks import ChunkFetch
from tailrace.weights.copying import bulk, open_source
from tailrace.weights.segment import map_segment
from tailrace.weights.tensors import TensorBytes, check_manifest, verify, views
from tailrace_protos import subjects
from tailrace_protos.weights import (
    CurrentWeightsReply,
    CurrentWeightsRequest,
    ReportKept,
    WeightManifest,
    WeightsApplied,
    WeightsAvailable,
)

log = get_logger(__name__)

_MAX_UNREPORTED = 256


class StagedWeights:
    """Verified bytes of a version. Its tensors are views, readable as long as they are referenced."""

    def __init__(self, manifest: WeightManifest, buffer: memoryview) -> None:
        self.manifest = manifest
        self._buffer: memoryview | None = buffer

    def tensors(self) -> Iterator[TensorBytes]:
        """Tensors in the order of the manifest."""
        assert self._buffer is not None, "closed"
        return views(self.manifest, self._buffer)

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

        Raises `ChecksumError`, `ManifestError`, `WeightsGoneError` or `WeightsUnreachableError`;
        the active version is unchanged then.
        """
        manifest, source = available.manifest, available.source
        check_manifest(manifest)
        fd = open_source(manifest, source, self._host_id, self._shm_folder)
        if fd is None:
            buffer = memoryview(bytearray(manifest.num_bytes))
            await ChunkFetch(source, manifest, buffer).run()
        else:
            buffer = map_segment(fd, manifest.num_bytes)
        await bulk(manifest.num_bytes, verify, manifest, buffer)
        return StagedWeights(manifest, buffer)

    async def report(self, applied: WeightsApplied) -> None:
        """Reports a version to weight_sync. Returns at once; the report is repeated until an answer."""
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
