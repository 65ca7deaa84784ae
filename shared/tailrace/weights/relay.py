"""Fetches buffers over ZMQ from holders that weight_sync names; passes them on while they arrive.

Invariants: a chunk that arrived is not fetched again, also after a change of the holder and when a
fetch is repeated; a holder that sends nothing is reported and replaced; damaged tensors are fetched
again from weight_sync itself. Nothing is passed on without `relays` in the announcement.
"""

import asyncio

from tailrace.bus import Bus, BusError
from tailrace.log import get_logger
from tailrace.weights.background import in_background
from tailrace.weights.buffers import new_buffer
from tailrace.weights.chunks import ChunkFetch, ChunkServer, Holding
from tailrace.weights.errors import ChecksumError, WeightsGoneError, WeightsUnreachableError
from tailrace.weights.tensors import damaged
from tailrace_protos import subjects
from tailrace_protos.weights import (
    RouteReply,
    RouteRequest,
    TensorEntry,
    WeightsAvailable,
    WeightSource,
)

log = get_logger(__name__)

NUM_STRIPES = 2  # parts of a buffer that travel along different ways
_ROOT = ""  # weight_sync itself, as a holder
_MUTE_S = 2.0  # a relay says four times a second that it lives
_ROUTE_S = 5.0
_PATIENCE_S = 10.0  # with weight_sync itself, whom nobody replaces
_MAX_ROUTES = 64  # holders tried for one part of a buffer


class WeightRelay:
    """Buffers of one server, whole or arriving, and their way to other servers."""

    def __init__(
        self,
        bus: Bus,
        run: str,
        host_id: str,
        server_id: str,
        *,
        bind_host: str = "",
        advertise_host: str = "",
    ) -> None:
        """Empty `bind_host`: the server passes on to servers of its host only."""
        self._bus = bus
        self._run = run
        self._host_id = host_id
        self._server_id = server_id
        self._holdings: dict[tuple[int, bool], Holding] = {}
        self._server = ChunkServer(
            self._held, bind_host=bind_host or "127.0.0.1", advertise_host=advertise_host
        )

    @property
    def source(self) -> WeightSource | None:
        """Address at which it passes on; None before the first fetch."""
        if not self._server.endpoint:
            return None
        return WeightSource(self._host_id, "", self._server.endpoint, self._server.public_key)

    @property
    def num_sent_bytes(self) -> int:
        """Bytes passed on to other servers."""
        return self._server.num_sent_bytes

    async def fetch_version(self, available: WeightsAvailable) -> memoryview:
        """Fetches and verifies a whole version; raises `WeightsError`."""
        manifest = available.manifest
        data = await self._fetch(available, manifest.policy_version, False, manifest.num_bytes)
        holding = self._holdings[(manifest.policy_version, False)]
        wrong = await in_background(damaged, manifest, data)
        if wrong:
            await self._fetch_again(available, holding, wrong)
        return data

    async def fetch_delta(
        self, available: WeightsAvailable, policy_version: int, num_bytes: int
    ) -> memoryview:
        """Fetches the delta to a version, without a check of its bytes; raises `WeightsError`."""
        return await self._fetch(available, policy_version, True, num_bytes)

    def hold(self, policy_version: int, data: memoryview) -> None:
        """Passes on a whole version that this server built itself."""
        self._holdings[(policy_version, False)] = Holding(data, complete=True)

    def holds(self, policy_version: int) -> bool:
        """Says whether it passes on all bytes of a version."""
        holding = self._held(policy_version, False)
        return holding is not None and holding.is_complete and self.source is not None

    def forget_delta(self, policy_version: int) -> None:
        """Drops a delta whose bytes are wrong."""
        self._holdings.pop((policy_version, True), None)

    def keep(self, *policy_versions: int | None) -> None:
        """Drops all versions but these."""
        self._holdings = {
            key: holding for key, holding in self._holdings.items() if key[0] in policy_versions
        }

    async def close(self) -> None:
        """Stops passing on."""
        await self._server.stop()
        self._holdings.clear()

    def _held(self, policy_version: int, is_delta: bool) -> Holding | None:
        return self._holdings.get((policy_version, is_delta))

    async def _fetch(
        self, available: WeightsAvailable, policy_version: int, is_delta: bool, num_bytes: int
    ) -> memoryview:
        key = (policy_version, is_delta)
        holding = self._holdings.get(key)
        if holding is None or holding.data.nbytes != num_bytes:
            holding = Holding(new_buffer(num_bytes), complete=False)
            self._holdings[key] = holding
        if available.relays and not self._server.endpoint:
            await self._server.start()
        parts = [
            asyncio.create_task(self._fetch_part(available, key, holding, stripe))
            for stripe in range(NUM_STRIPES)
            if holding.missing(stripe, NUM_STRIPES)
        ]
        try:
            await asyncio.gather(*parts)
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        return holding.data

    async def _fetch_part(
        self, available: WeightsAvailable, key: tuple[int, bool], holding: Holding, stripe: int
    ) -> None:
        """Fetches one part, from another holder after each that fails."""
        failed = _ROOT
        for _ in range(_MAX_ROUTES):
            route = await self._route(available, key, stripe, failed)
            is_root = route.server_id == _ROOT
            fetch = ChunkFetch(
                route.source,
                key[0],
                holding,
                is_delta=key[1],
                stripe=stripe,
                num_stripes=NUM_STRIPES,
                silence_s=_MUTE_S,
                patience_s=_PATIENCE_S if is_root else 0.0,
            )
            try:
                await fetch.run()
            except (WeightsGoneError, WeightsUnreachableError) as error:
                if is_root:
                    raise
                failed = route.server_id
                log.warning("holder of weights replaced", holder=failed, error=str(error))
            else:
                return
        raise WeightsGoneError(key[0], f"{_MAX_ROUTES} servers that hold it failed")

    async def _route(
        self, available: WeightsAvailable, key: tuple[int, bool], stripe: int, failed: str
    ) -> RouteReply:
        """The holder to fetch from; weight_sync itself if it does not answer."""
        own = self.source
        if not available.relays or own is None:
            return RouteReply(_ROOT, available.source)
        target = available.manifest.target
        request = RouteRequest(self._server_id, key[0], key[1], stripe, own, failed, target)
        try:
            return await self._bus.request(
                subjects.weight_route(self._run), request, RouteReply, timeout_s=_ROUTE_S
            )
        except BusError as error:
            log.warning("no way for weights from weight_sync", policy_version=key[0], error=str(error))
            return RouteReply(_ROOT, available.source)

    async def _fetch_again(
        self, available: WeightsAvailable, holding: Holding, wrong: list[TensorEntry]
    ) -> None:
        """Fetches damaged tensors from weight_sync; raises `ChecksumError` if they stay damaged."""
        manifest = available.manifest
        log.warning(
            "damaged tensors fetched again",
            policy_version=manifest.policy_version,
            tensor=wrong[0].name,
            num_tensors=len(wrong),
        )
        for entry in wrong:
            holding.forget(entry.offset, entry.offset + entry.num_bytes)
        await ChunkFetch(available.source, manifest.policy_version, holding).run()
        if left := await in_background(damaged, manifest, holding.data):
            self._holdings.pop((manifest.policy_version, False), None)
            raise ChecksumError(left[0].name, manifest.policy_version)
