"""Offers of the learner: what fails leaves nothing, and comes again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.bus import CallFailedError
from tailrace.store import StoreError
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.weights import OfferWeights, WeightManifest, WeightsAvailable
from tailrace_weight_sync.core.catalogue import Catalogue
from tailrace_weight_sync.handlers import WeightSync
from tests.unit.tailrace_weight_sync.test_segment_vault import Learner, made_vault, num_segments


class FakeVersions:
    """Numbers and records of versions; `is_away`: nothing is recorded."""

    def __init__(self) -> None:
        self.is_away = False
        self.recorded: list[int] = []

    async def allocate(self, lineage: str, optimizer_step: int, at_least: int) -> int:
        return optimizer_step

    async def record(self, manifest: WeightManifest) -> None:
        if self.is_away:
            raise StoreError("Redis is away")
        self.recorded.append(manifest.policy_version)


async def test_a_version_that_cannot_be_recorded_leaves_no_memory_and_comes_again(
    tmp_path: Path,
) -> None:
    vault, versions, announced = made_vault(tmp_path), FakeVersions(), []

    async def announce(available: WeightsAvailable) -> None:
        announced.append(available.manifest.policy_version)

    sync = WeightSync(Catalogue(2), vault, versions, announce, targets={})  # type: ignore[arg-type]
    learner = Learner(tmp_path)
    offers = [OfferWeights(*learner.offer(version)) for version in range(3)]
    assert (await sync.take(offers[0])).policy_version == 0
    versions.is_away = True
    for offer in offers[1:]:
        with pytest.raises(CallFailedError, match="Redis is away") as failed:
            await sync.take(offer)
        assert failed.value.code is CallErrorCode.INTERNAL
        assert vault.buffer(offer.manifest.optimizer_step) is None
    assert num_segments(tmp_path) == 2, "version 0, and memory for the next one"
    versions.is_away = False
    assert (await sync.take(offers[2])).policy_version == 2
    assert (versions.recorded, announced) == ([0, 2], [0, 2])
    assert num_segments(tmp_path) == 2
    await vault.stop(delete=True)
    assert num_segments(tmp_path) == 0
