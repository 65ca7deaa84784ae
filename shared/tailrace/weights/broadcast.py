"""Inference server's side of broadcasts: asks weight_sync for a place, receives with the others.

torch is imported with the first broadcast. Invariant: whatever goes wrong, the answer is "not
received", and the version is fetched in another way.
"""

import asyncio
from typing import Any

from tailrace.bus import Bus, BusError
from tailrace.config import advertised_host
from tailrace.import_path import load_extra
from tailrace.log import get_logger
from tailrace.weights.background import in_background
from tailrace.weights.buffers import new_buffer
from tailrace.weights.tensors import damaged
from tailrace_protos import subjects
from tailrace_protos.weights import BroadcastReply, BroadcastRequest, WeightManifest, WeightSource

log = get_logger(__name__)

TORCH_PART = ("tailrace.weights.process_group", "inference", "weight_sync.transport: broadcast")
_PLACE_S = 10.0  # for the answer of weight_sync, which waits for other servers


class BroadcastMember:
    """Place of one server in the process group that it was in last."""

    def __init__(self, bus: Bus, run: str, host_id: str, server_id: str, own_host: str) -> None:
        """`own_host`: address at which other hosts reach this one; empty: that of the host."""
        self._bus = bus
        self._run = run
        self._host_id = host_id
        self._server_id = server_id
        self._own_host = own_host
        self._group: Any = None
        self.num_groups = 0  # joined so far

    async def receive(self, manifest: WeightManifest, source: WeightSource) -> memoryview | None:
        """All bytes of a version, verified; None if they did not come."""
        part: Any = await asyncio.to_thread(load_extra, *TORCH_PART)
        version = manifest.policy_version
        request = BroadcastRequest(self._server_id, version, self._group_id, part.own_gpu())
        try:
            place = await self._bus.request(
                subjects.weight_broadcast(self._run), request, BroadcastReply, timeout_s=_PLACE_S
            )
        except BusError as error:
            log.warning("no place in a broadcast", policy_version=version, error=str(error))
            return None
        if not place.group_id:
            log.info("no broadcast at this time: weights fetched otherwise", policy_version=version)
            return None
        data = new_buffer(manifest.num_bytes)
        try:
            await asyncio.to_thread(self._receive, part, place, source, data)
        except part.BroadcastFailedError as error:
            self.close()
            log.warning("broadcast failed: fetched otherwise", policy_version=version, error=str(error))
            return None
        if wrong := await in_background(damaged, manifest, data):
            log.warning("broadcast damaged", policy_version=version, tensor=wrong[0].name)
            return None
        return data

    def close(self) -> None:
        """Leaves the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    @property
    def _group_id(self) -> str:
        return "" if self._group is None else str(self._group.group_id)

    def _receive(
        self, part: Any, place: BroadcastReply, source: WeightSource, data: memoryview
    ) -> None:
        if place.group_id != self._group_id:
            self.close()
            is_near = source.host_id == self._host_id
            host = self._own_host or ("127.0.0.1" if is_near else advertised_host())
            self._group = part.BroadcastGroup(place, host)
            self.num_groups += 1
        self._group.receive(data)
