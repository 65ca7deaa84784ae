"""Handlers of weight_sync: offers of the learner, requests of new servers, reports of servers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
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
from tailrace_weight_sync.adapters.repairs import Repairs
from tailrace_weight_sync.adapters.routes import Routes
from tailrace_weight_sync.adapters.segment_vault import SegmentVault
from tailrace_weight_sync.adapters.targets import TargetVersions
from tailrace_weight_sync.core.catalogue import BaseNotHeldError, Catalogue, ConflictingOfferError

log = get_logger(__name__)

_REFUSED = (
    BaseNotHeldError,
    ChecksumError,
    ConflictingOfferError,
    ManifestError,
)

Announce = Callable[[WeightsAvailable], Awaitable[None]]


class WeightSync:
    """The one actor of the service; it handles one offer at a time."""

    def __init__(
        self,
        catalogue: Catalogue,
        vault: SegmentVault,
        versions: RedisVersions,
        announce: Announce,
        *,
        targets: Mapping[str, TargetVersions],
        relays: bool = False,
        broadcasts: bool = False,
    ) -> None:
        self._catalogue = catalogue
        self._vault = vault
        self._versions = versions
        self._announce = announce
        self._relays = relays
        self._broadcasts = broadcasts
        self._targets = targets  # by declared type
        self._routes = Routes(vault)
        self._repairs = Repairs(catalogue, vault, targets.values())
        self._turn = asyncio.Lock()
        self.published = asyncio.Event()  # set with every new version

    async def take(self, offer: OfferWeights) -> WeightsTaken:
        """Turns offered weights into a version: copied, verified, recorded, announced."""
        try:
            async with self._turn:
                with metrics.TAKE_SECONDS.time():
                    return WeightsTaken(await self._take(offer))
        except SegmentSpaceError as error:  # room for one version was there: it may come again
            had_room = self._catalogue.newest is not None
            code = CallErrorCode.INTERNAL if had_room else CallErrorCode.INVALID
            raise self._refusal(code, error) from error
        except _REFUSED as error:
            raise self._refusal(CallErrorCode.INVALID, error) from error
        except (WeightsGoneError, WeightsUnreachableError, StoreError) as error:
            raise self._refusal(CallErrorCode.INTERNAL, error) from error

    async def current(self, request: CurrentWeightsRequest) -> CurrentWeightsReply:
        """Answers with the newest version, in the type that the server declares."""
        if not request.target:
            log.info("newest version requested", server_id=request.server_id)
            return CurrentWeightsReply(self._available())
        try:
            return CurrentWeightsReply(await self._available_as(request.target))
        except (ChecksumError, SegmentSpaceError, WeightsGoneError) as error:
            log.error("weights not converted", target=request.target, error=str(error))
            if isinstance(error, ChecksumError):
                self._repairs.needed.set()
            raise CallFailedError(CallErrorCode.INTERNAL, str(error)) from error

    async def route(self, request: RouteRequest) -> RouteReply:
        """Names the holder from which a server fetches."""
        return await self._routes_of(request.target).route(request)

    async def applied(self, report: WeightsApplied) -> ReportKept:
        """Records the report of a server about a version."""
        ids = {"server_id": report.server_id, "policy_version": report.policy_version}
        if report.error:
            metrics.APPLIED_VERSIONS.labels("failed").inc()
            log.error("weights not applied", error=report.error, **ids)
            if report.damaged:
                self._repairs.needed.set()
        else:
            metrics.APPLIED_VERSIONS.labels("ok").inc()
            log.info("weights applied", fetch_s=report.fetch_s, swap_s=report.swap_s, **ids)
            self._routes_of(report.target).applied(report)
            await self._versions.record_applied(report)
        return ReportKept(report.policy_version)

    async def announce_newest(self) -> None:
        """Announces the newest version again, for servers that missed it."""
        available = self._available()
        if available is not None:
            await self._announce(available)

    async def repair_often(self) -> None:
        """Checks the newest version, and its base, after each report of wrong checksums."""
        while True:
            await self._repairs.needed.wait()
            async with self._turn:
                for policy_version in await self._repairs.repair():
                    self._routes.drop(policy_version)
                    await self.announce_newest()

    async def hold(self, manifest: WeightManifest) -> None:
        """Records and holds a version whose bytes are in the vault."""
        await self._vault.write_file(manifest)
        await self._versions.record(manifest)
        for policy_version in self._catalogue.add(manifest):
            self._vault.drop(policy_version)
            self._routes.drop(policy_version)
            for versions in self._targets.values():
                versions.drop(policy_version)
        newest = self._catalogue.newest
        assert newest is not None
        metrics.NEWEST_VERSION.set(newest.policy_version)
        converted = sum(versions.num_bytes for versions in self._targets.values())
        metrics.HELD_BYTES.set(self._vault.num_bytes + converted)
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
            undo.callback(self._vault.drop, manifest.policy_version)
            with metrics.DELTA_SECONDS.time():
                await self._vault.add_delta(self._catalogue.newest, manifest)
            await self.hold(manifest)
            undo.pop_all()
        self._repairs.offered(offer)
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

    async def _available_as(self, target: str) -> WeightsAvailable | None:
        """The newest version in a declared type, or its base, if it consists of adapters."""
        available, versions = self._available(), self._targets.get(target)
        if versions is None:
            reason = f"weights_dtype {target!r} is none of {', '.join(self._targets)}"
            raise CallFailedError(CallErrorCode.INVALID, reason)
        if available is None:
            return None
        whole = available.manifest if available.base is None else available.base.manifest
        made = await versions.made(whole)
        if made is None:
            return available
        source = versions.source(whole.policy_version)
        if available.base is not None:
            return msgspec.structs.replace(available, base=BaseWeights(made, source))
        return msgspec.structs.replace(
            available, manifest=made, source=source, deltas=versions.deltas, broadcasts=False
        )

    def _routes_of(self, target: str) -> Routes:
        versions = self._targets.get(target)
        return self._routes if versions is None else versions.routes

    def _refusal(self, code: CallErrorCode, error: Exception) -> CallFailedError:
        metrics.REFUSED_OFFERS.inc()
        log.error("offer refused", code=code.value, error=str(error))
        return CallFailedError(code, str(error))
