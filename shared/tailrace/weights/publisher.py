"""Learner's side: offers the weights of a step until weight_sync holds a verified copy.

The buffer is shared memory of this process, reused in each step. Offers are repeated: a step gets one
policy version for any number of offers, so that a restart of weight_sync only delays the step.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from tailrace.bus import Bus, CallFailedError, CallTimeoutError, NoResponderError
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.weights.chunks import ChunkServer, Holding
from tailrace.weights.copying import bulk
from tailrace.weights.errors import WeightsNotTakenError
from tailrace.weights.segment import SegmentFolder, SharedSegment
from tailrace.weights.tensors import TensorBytes, fill, layout
from tailrace_protos import subjects
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.weights import (
    OfferWeights,
    TensorEntry,
    WeightManifest,
    WeightSource,
    WeightsTaken,
)

log = get_logger(__name__)

_UNASSIGNED = -1
_SLOWEST_BYTES_PER_S = 20e6  # lowest network speed before an offer is repeated


class WeightPublisher:
    """Publishes one learner's weights; `close` when done."""

    def __init__(
        self,
        bus: Bus,
        run: str,
        host_id: str,
        *,
        bind_host: str = "127.0.0.1",
        advertise_host: str = "",
        shm_folder: Path | None = None,
        outage_s: float = 300.0,
    ) -> None:
        self._bus = bus
        self._subject = subjects.offer_weights(run)
        self._host_id = host_id
        self._outage_s = outage_s
        self._folder = SegmentFolder(run, "learner", shm_folder)
        self._folder.sweep()
        self._segment: SharedSegment | None = None
        self._server = ChunkServer(self._held, bind_host=bind_host, advertise_host=advertise_host)
        self._turn = asyncio.Lock()

    async def publish(
        self,
        tensors: Sequence[TensorBytes],
        *,
        lineage: str,
        optimizer_step: int,
        base_version: int | None = None,
    ) -> int:
        """Publishes weights; returns their policy version once weight_sync holds a verified copy.

        They are all weights of the model, or the adapters that add to those of `base_version`.

        Waits up to `outage_s` for weight_sync. Raises `ManifestError` for inconsistent tensors,
        `SegmentSpaceError` without room for them, `WeightsNotTakenError` for a refused offer.
        """
        async with self._turn:
            if not self._server.endpoint:
                await self._server.start()
            num_bytes = sum(tensor.data.nbytes for tensor in tensors)
            entries, num_bytes = await bulk(num_bytes, self._stage, tensors)
            manifest = WeightManifest(
                _UNASSIGNED, lineage, optimizer_step, base_version, entries, num_bytes
            )
            assert self._segment is not None
            source = WeightSource(
                host_id=self._host_id,
                shm_name=self._segment.name,
                zmq_endpoint=self._server.endpoint,
                zmq_public_key=self._server.public_key,
            )
            return await self._offer(OfferWeights(manifest, source))

    async def close(self) -> None:
        """Stops serving the buffer and deletes it."""
        await self._server.stop()
        if self._segment is not None:
            self._segment.close(delete=True)
            self._segment = None

    def _stage(self, tensors: Sequence[TensorBytes]) -> tuple[tuple[TensorEntry, ...], int]:
        offsets, num_bytes = layout(tensors)
        if self._segment is None or self._segment.num_bytes != num_bytes:
            if self._segment is not None:
                self._segment.close(delete=True)
                self._segment = None
            self._segment = self._folder.create(num_bytes)
        return fill(self._segment.data, tensors, offsets), num_bytes

    async def _offer(self, offer: OfferWeights) -> int:
        loop = asyncio.get_running_loop()
        began = loop.time()
        backoff = Backoff(0.05, 0.5)
        timeout_s = 10.0 + offer.manifest.num_bytes / _SLOWEST_BYTES_PER_S
        while True:
            try:
                taken = await self._bus.request(self._subject, offer, WeightsTaken, timeout_s=timeout_s)
                return taken.policy_version
            except (CallFailedError, NoResponderError, CallTimeoutError) as error:
                refused = isinstance(error, CallFailedError) and error.code is CallErrorCode.INVALID
                if refused or loop.time() - began > self._outage_s:
                    lineage, step = offer.manifest.lineage, offer.manifest.optimizer_step
                    raise WeightsNotTakenError(lineage, step, str(error)) from error
                log.warning(
                    "weights offered again", step=offer.manifest.optimizer_step, error=str(error)
                )
                await backoff.sleep()

    def _held(self, policy_version: int, is_delta: bool) -> Holding | None:
        if self._segment is None or policy_version != _UNASSIGNED or is_delta:
            return None
        return Holding(self._segment.data, complete=True)
