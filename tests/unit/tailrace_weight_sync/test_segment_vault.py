"""Versions in shared memory: one copy of each, and differences that follow each other."""

from __future__ import annotations

import itertools
from pathlib import Path

import msgspec
import numpy as np
import pytest

from tailrace.weights import TensorBytes, WeightsGoneError
from tailrace.weights.segment import SegmentFolder
from tailrace.weights.tensors import fill, layout
from tailrace_protos.weights import WeightManifest, WeightSource
from tailrace_weight_sync.adapters.segment_vault import SegmentVault
from tailrace_weight_sync.adapters.targets import TargetVersions

HOST = "host"


def made_vault(folder: Path, target: str = "") -> SegmentVault:
    return SegmentVault(
        "run",
        HOST,
        bind_host="127.0.0.1",
        advertise_host="",
        shm_folder=folder,
        max_delta_share=1.0,
        target=target,
    )


class Learner:
    """Offers versions of one tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = SegmentFolder("run", "learner", folder)

    def offer(self, version: int) -> tuple[WeightManifest, WeightSource]:
        array = np.arange(4096, dtype=np.float32) + version
        tensors = [TensorBytes("w.weight", "float32", (64, 64), memoryview(array).cast("B"))]
        offsets, num_bytes = layout(tensors)
        segment = self._folder.create(num_bytes)
        entries = fill(segment.data, tensors, offsets)
        manifest = WeightManifest(version, "a", version, None, entries, num_bytes)
        return manifest, WeightSource(HOST, segment.name, "")


async def hold(vault: SegmentVault, offer: tuple[WeightManifest, WeightSource]) -> WeightManifest:
    manifest, source = offer
    (await vault.copy(manifest, source)).seal(manifest)
    return manifest


def num_segments(folder: Path) -> int:
    return len([*folder.glob("*tailrace.run.weight_sync*")])


async def test_a_version_that_is_copied_again_leaves_one_copy(tmp_path: Path) -> None:
    """As after an outage of Redis between the number of a version and its record."""
    vault, learner = made_vault(tmp_path), Learner(tmp_path)
    offer = learner.offer(3)
    for _ in range(3):
        manifest = await hold(vault, offer)
    assert num_segments(tmp_path) == 1
    assert await vault.is_whole(manifest)
    await vault.stop(delete=True)
    assert num_segments(tmp_path) == 0


async def test_differences_of_a_version_that_is_copied_again_follow_each_other(
    tmp_path: Path,
) -> None:
    vault, learner = made_vault(tmp_path), Learner(tmp_path)
    vault._server.is_used = True  # a server of another host has fetched
    manifests = [await hold(vault, learner.offer(version)) for version in range(3)]
    for before, after in ((0, 1), (1, 2), (1, 2)):
        await vault.add_delta(manifests[before], manifests[after])
    chain = [(delta.from_version, delta.policy_version) for delta in vault.deltas]
    assert chain[-1] == (1, 2)
    assert all(one[1] == other[0] for one, other in itertools.pairwise(chain))
    await vault.stop(delete=True)


async def test_a_version_that_is_dropped_while_it_is_converted_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published, converted = made_vault(tmp_path), made_vault(tmp_path, "bfloat16")
    versions, learner = TargetVersions("bfloat16", converted, published.buffer), Learner(tmp_path)
    converted._server.is_used = True
    manifests = [await hold(published, learner.offer(version)) for version in range(3)]
    assert await versions.made(manifests[0]) is not None
    add_delta = converted.add_delta

    async def add_late(before: WeightManifest | None, after: WeightManifest) -> None:
        await add_delta(before, after)
        published.drop(after.policy_version)  # newer versions have come meanwhile

    with monkeypatch.context() as patch:
        patch.setattr(converted, "add_delta", add_late)
        with pytest.raises(WeightsGoneError, match="newer version"):
            await versions.made(manifests[1])
    assert converted.buffer(1) is None
    made = await versions.made(manifests[2])
    assert made is not None
    assert [delta.from_version for delta in versions.deltas] in ([], [0])
    assert await converted.is_whole(made)
    for vault in (published, converted):
        await vault.stop(delete=True)
    assert msgspec.structs.asdict(made)["target"] == "bfloat16"
