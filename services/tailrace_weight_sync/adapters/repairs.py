"""Repair of held versions whose bytes changed in memory, after a server has reported wrong checksums.

The newest version is copied again from the learner, whose buffer keeps it until the next one; versions
in a declared type are made again from it. Invariant: what replaces a version has its checksums.
"""

import asyncio
from collections.abc import Iterable

from tailrace.log import get_logger
from tailrace.weights import (
    ChecksumError,
    SegmentSpaceError,
    WeightsGoneError,
    WeightsUnreachableError,
)
from tailrace_protos.weights import OfferWeights, WeightManifest
from tailrace_weight_sync import metrics
from tailrace_weight_sync.adapters.segment_vault import SegmentVault
from tailrace_weight_sync.adapters.targets import TargetVersions
from tailrace_weight_sync.core.catalogue import Catalogue

log = get_logger(__name__)

_REMEDY = (
    "the next version replaces them; or restart weight_sync, which takes the snapshot in its state "
    "directory"
)


class Repairs:
    """Checks and repairs the newest version and its base."""

    def __init__(
        self, catalogue: Catalogue, vault: SegmentVault, targets: Iterable[TargetVersions]
    ) -> None:
        self._catalogue = catalogue
        self._vault = vault
        self._targets = tuple(targets)
        self._offer: OfferWeights | None = None  # of the newest version
        self.needed = asyncio.Event()  # a server reports wrong checksums

    def offered(self, offer: OfferWeights) -> None:
        """Records the offer that became the newest version."""
        self._offer = offer

    async def repair(self) -> list[int]:
        """Returns the versions of which servers find other bytes now."""
        self.needed.clear()
        newest = self._catalogue.newest
        if newest is None:
            return []
        checked = (newest, self._catalogue.base_of(newest))
        return [held.policy_version for held in checked if held and await self._repair(held)]

    async def _repair(self, manifest: WeightManifest) -> bool:
        dropped = [await versions.drop_damaged(manifest.policy_version) for versions in self._targets]
        if await self._vault.is_whole(manifest):
            return any(dropped)
        version = manifest.policy_version
        try:
            await self._copy_again(manifest)
        except (ChecksumError, SegmentSpaceError, WeightsGoneError, WeightsUnreachableError) as error:
            log.error("damaged weights stay", policy_version=version, error=str(error), remedy=_REMEDY)
            return any(dropped)
        for versions in self._targets:
            versions.drop(version)
        metrics.REPAIRED_VERSIONS.inc()
        log.warning("damaged weights copied again from the learner", policy_version=version)
        return True

    async def _copy_again(self, manifest: WeightManifest) -> None:
        offer = self._offer
        if offer is None or offer.manifest.tensors != manifest.tensors:
            raise WeightsGoneError(
                manifest.policy_version, "the learner's buffer holds another version"
            )
        (await self._vault.copy(offer.manifest, offer.source)).seal(manifest)
