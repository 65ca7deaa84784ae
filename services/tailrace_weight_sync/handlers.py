"""Handlers of weight_sync: offers of the learner, requests of new servers, reports of servers."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack

import msgspec

from tailrace.bus import CallFailedError
from tailrace.log import get_logger
from tailrace.store import StoreError
from tailrace.weights import (
    ChecksumError,
    ManifestError,
    SegmentSpaceError,
    WeightsGoneError,
    WeightsUnreachableError,
)
from tailrace.weights.tensors import check_manifest
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.weights import (
    BaseWeights,
    CurrentWeightsReply,
    CurrentWeightsRequest,
    OfferWeights,
    ReportKept,
    RouteReply,
    RouteRequest,
    WeightManifest,
    WeightsApplied,
    WeightsAvailable,
    WeightsTaken,
)
from tailrace_weight_sync import metrics
from tailrace_weight_sync.adapters.redis_versions import RedisVersions
from tailrace_weight_sync.adapters.segment_vault import SegmentVault
from tailrace_weight_sync.core.catalogue import BaseNotHeldError, Catalogue, ConflictingOfferError
from tailrace_weight_sync.core.relays import NUM_STRIPES, ROOT, Joiner, RelayTree

log = get_logger(__name__)

_REFUSED = (
    BaseNotHeldError,
    ChecksumError,
    ConflictingOfferError,
    ManifestError,
    SegmentSpaceError,
)

_GATHER_S = 0.01  # servers that hear of a version at once ask within this time

Announce = Callable[[WeightsAvailable], Awaitable[None]]


class Routes:
    """Names to each server the holder from which it fetches a buffer."""

    def __init__(self, vault: SegmentVault) -> None:
        self._vault = vault
        self._trees: dict[tuple[int, bool], RelayTree] = {}
        self._gathered: dict[tuple[int, bool], tuple[list[Joiner], asyncio.Task[None]]] = {}

    async def route(self, request: RouteRequest) -> RouteReply:
        """Answers with a holder; servers that ask at the same time are planned together."""
        key = (request.policy_version, request.is_delta)
        if not self._vault.serves(*key):
            reason = f"policy version {request.policy_version} is no longer held"
            raise CallFailedError(CallErrorCode.INVALID, reason)
        if not 0 <= request.stripe < NUM_STRIPES:
            raise CallFailedError(CallErrorCode.INVALID, f"there is no part {request.stripe}")
        tree = self._trees.setdefault(key, RelayTree())
        joiner = Joiner(request.server_id, request.relay)
        if not tree.knows(joiner):
            await self._planned(key, tree, joiner)
        if request.failed:
            metrics.FAILED_HOLDERS.inc()
            log.warning("holder failed", holder=request.failed, server_id=request.server_id)
        holder = tree.parent(request.server_id, request.stripe, request.failed)
        metrics.ROUTES.labels("weight_sync" if holder == ROOT else "server").inc()
        if holder == ROOT:
            return RouteReply(ROOT, self._vault.zmq_source)
        return RouteReply(holder, tree.source_of(holder))

    def applied(self, report: WeightsApplied) -> None:
        """A server that applied a version serves it."""
        if report.relay is None:
            return
        for (policy_version, _), tree in self._trees.items():
            if policy_version == report.policy_version:
                tree.finished(Joiner(report.server_id, report.relay))

    def drop(self, policy_version: int) -> None:
        """Forgets the trees of a version that is no longer held."""
        for is_delta in (False, True):
            self._trees.pop((policy_version, is_delta), None)

    async def _planned(self, key: tuple[int, bool], tree: RelayTree, joiner: Joiner) -> None:
        if key not in self._gathered:
            self._gathered[key] = ([], asyncio.create_task(self._plan(key, tree)))
        joiners, task = self._gathered[key]
        joiners.append(joiner)
        await task

    async def _plan(self, key: tuple[int, bool], tree: RelayTree) -> None:
        await asyncio.sleep(_GATHER_S)
        joiners, _ = self._gathered.pop(key)
        tree.plan({joiner.server_id: joiner for joiner in joiners}.values())


class WeightSync:
    """The one actor of the service; it handles one offer at a time."""

    def __init__(
        self,
        catalogue: Catalogue,
        vault: SegmentVault,
        versions: RedisVersions,
        announce: Announce,
        *,
        relays: bool = False,
        broadcasts: bool = False,
    ) -> None:
        self._catalogue = catalogue
        self._vault = vault
        self._versions = versions
        self._announce = announce
        self._relays = relays
        self._broadcasts = broadcasts
        self.routes = Routes(vault)
        self._turn = asyncio.Lock()
        self.published = asyncio.Event()  # set with every new version

    async def take(self, offer: OfferWeights) -> WeightsTaken:
        """Turns offered weights into a version: copied, verified, recorded, announced."""
        try:
            async with self._turn:
                with metrics.TAKE_SECONDS.time():
                    return WeightsTaken(await self._take(offer))
        except _REFUSED as error:
            raise self._refusal(CallErrorCode.INVALID, error) from error
        except (WeightsGoneError, WeightsUnreachableError, StoreError) as error:
            raise self._refusal(CallErrorCode.INTERNAL, error) from error

    async def current(self, request: CurrentWeightsRequest) -> CurrentWeightsReply:
        """Answers with the newest version, for a server that has none yet."""
        log.info("newest version requested", server_id=request.server_id)
        return CurrentWeightsReply(self._available())

    async def applied(self, report: WeightsApplied) -> ReportKept:
        """Records the report of a server about a version."""
        ids = {"server_id": report.server_id, "policy_version": report.policy_version}
        if report.error:
            metrics.APPLIED_VERSIONS.labels("failed").inc()
            log.error("weights not applied", error=report.error, **ids)
        else:
            metrics.APPLIED_VERSIONS.labels("ok").inc()
            log.info("weights applied", fetch_s=report.fetch_s, swap_s=report.swap_s, **ids)
            self.routes.applied(report)
            await self._versions.record_applied(report)
        return ReportKept(report.policy_version)

    async def announce_newest(self) -> None:
        """Announces the newest version again, for servers that missed it."""
        available = self._available()
        if available is not None:
            await self._announce(available)

    async def hold(self, manifest: WeightManifest) -> None:
        """Records and holds a version whose bytes are in the vault."""
        await self._vault.write_file(manifest)
        await self._versions.record(manifest)
        for policy_version in self._catalogue.add(manifest):
            self._vault.drop(policy_version)
            self.routes.drop(policy_version)
        newest = self._catalogue.newest
        assert newest is not None
        metrics.NEWEST_VERSION.set(newest.policy_version)
        metrics.HELD_BYTES.set(self._vault.num_bytes)
        self.published.set()

    async def _take(self, offer: OfferWeights) -> int:
        offered = offer.manifest
        check_manifest(offered)
        self._catalogue.base_of(offered)
        held = self._catalogue.find(offered)
        if held is not None:
            await self._versions.record(held)
            return held.policy_version
        numbering = asyncio.create_task(
            self._versions.allocate(
                offered.lineage, offered.optimizer_step, self._catalogue.next_version
            )
        )
        with ExitStack() as undo:
            undo.callback(numbering.cancel)
            copy = await self._vault.copy(offered, offer.source)
            undo.callback(copy.discard)
            manifest = msgspec.structs.replace(offered, policy_version=await numbering)
            copy.seal(manifest)
            undo.pop_all()
        with metrics.DELTA_SECONDS.time():
            await self._vault.add_delta(self._catalogue.newest, manifest)
        await self.hold(manifest)
        metrics.PUBLISHED_VERSIONS.inc()
        await self.announce_newest()
        log.info(
            "weights published",
            policy_version=manifest.policy_version,
            lineage=manifest.lineage,
            step=manifest.optimizer_step,
        )
        return manifest.policy_version

    def _available(self) -> WeightsAvailable | None:
        newest = self._catalogue.newest
        if newest is None:
            return None
        whole = self._catalogue.base_of(newest)
        base = BaseWeights(whole, self._vault.source(whole.policy_version)) if whole else None
        return WeightsAvailable(
            newest,
            self._vault.source(newest.policy_version),
            base,
            tuple(
                delta for delta in self._vault.deltas if delta.policy_version <= newest.policy_version
            ),
            self._vault.makes_deltas,
            self._relays,
            self._broadcasts,
        )

    def _refusal(self, code: CallErrorCode, error: Exception) -> CallFailedError:
        metrics.REFUSED_OFFERS.inc()
        log.error("offer refused", code=code.value, error=str(error))
        return CallFailedError(code, str(error))
