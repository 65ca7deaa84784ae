"""Versions in a type that servers declare, beside the published ones.

A version is converted once, when the first server asks for it. It has the number of the published one,
and a manifest with checksums, a segment, differences and relay trees of its own. Invariants: only held
versions are converted; nothing of them survives this process, since it can be made again.
"""

import asyncio
from collections.abc import Callable

from tailrace.log import get_logger
from tailrace.weights import WeightsGoneError
from tailrace.weights.copying import bulk
from tailrace.weights.target_types import planned
from tailrace.weights.tensors import verify
from tailrace_protos.weights import WeightDelta, WeightManifest, WeightSource
from tailrace_weight_sync import metrics
from tailrace_weight_sync.adapters.routes import Routes
from tailrace_weight_sync.adapters.segment_vault import SegmentVault

log = get_logger(__name__)


class TargetVersions:
    """Versions in one declared type."""

    def __init__(
        self, target: str, vault: SegmentVault, published: Callable[[int], memoryview | None]
    ) -> None:
        """`published`: bytes of a held version as the learner published it."""
        self._target = target
        self._vault = vault
        self._published = published
        self._newest: WeightManifest | None = None
        self._made: dict[int, WeightManifest] = {}
        self._turn = asyncio.Lock()
        self.routes = Routes(vault)

    @property
    def num_bytes(self) -> int:
        """Bytes of all converted versions."""
        return self._vault.num_bytes

    @property
    def deltas(self) -> tuple[WeightDelta, ...]:
        """Differences for other hosts, up to the newest converted version."""
        return self._vault.deltas

    def source(self, policy_version: int) -> WeightSource:
        """Addresses at which other processes fetch a converted version."""
        return self._vault.source(policy_version)

    async def start(self) -> None:
        """Deletes what a killed predecessor left, and starts to serve other hosts."""
        self._vault.sweep()
        await self._vault.start()

    async def stop(self) -> None:
        """Stops serving; deletes all converted versions."""
        await self._vault.stop(delete=True)

    async def made(self, manifest: WeightManifest) -> WeightManifest | None:
        """Manifest of a whole held version in this type; None if it has this type already.

        Raises `SegmentSpaceError`, `ChecksumError` if the published bytes have changed, or
        `WeightsGoneError` if it is dropped meanwhile.
        """
        plan = planned(manifest, self._target)
        if plan is None:
            return None
        version = manifest.policy_version
        async with self._turn:
            if version not in self._made:
                await self._make(manifest, plan)
            return self._made[version]

    async def _make(self, manifest: WeightManifest, plan: WeightManifest) -> None:
        version = manifest.policy_version
        data = self._published(version)
        if data is None:
            raise WeightsGoneError(version, "a newer version has replaced it")
        with metrics.CONVERT_SECONDS.labels(self._target).time():
            await bulk(manifest.num_bytes, verify, manifest, data)  # it gets checksums of its own
            made = await self._vault.convert(manifest, data, plan)
        await self._vault.write_file(made)
        if self._newest is None or self._newest.policy_version < version:
            await self._vault.add_delta(self._newest, made)
            self._newest = made
        if self._published(version) is None:  # dropped meanwhile: nobody would drop what was made of it
            self._vault.drop(version)
            raise WeightsGoneError(version, "a newer version has replaced it")
        self._made[version] = made
        log.info("weights converted", policy_version=version, target=self._target)

    async def drop_damaged(self, policy_version: int) -> bool:
        """Deletes a version whose bytes have changed, so that it is made again; says whether it did."""
        async with self._turn:
            made = self._made.get(policy_version)
            if made is None or await self._vault.is_whole(made):
                return False
            self.drop(policy_version)
            return True

    def drop(self, policy_version: int) -> None:
        """Deletes a version."""
        if self._made.pop(policy_version, None) is not None:
            self._vault.drop(policy_version)
            self.routes.drop(policy_version)
