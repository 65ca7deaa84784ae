"""Versions that are held, and repeated offers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tailrace_protos.weights import TensorEntry, WeightManifest
from tailrace_weight_sync.core.catalogue import BaseNotHeldError, Catalogue, ConflictingOfferError


def manifest(version: int, step: int, *, lineage: str = "a", checksum: int = 1) -> WeightManifest:
    tensors = (
        TensorEntry("norm", "float32", (1,), 0, 4, 9),
        TensorEntry("head", "float32", (1,), 64, 4, checksum),
    )
    return WeightManifest(version, lineage, step, None, tensors, 128)


def test_a_step_offered_again_is_found_under_its_version() -> None:
    catalogue = Catalogue(keep=2)
    catalogue.add(manifest(3, step=1))
    found = catalogue.find(manifest(-1, step=1))
    assert found is not None
    assert found.policy_version == 3
    assert catalogue.find(manifest(-1, step=2)) is None
    assert catalogue.find(manifest(-1, step=1, lineage="b")) is None


def test_a_step_offered_again_with_other_weights_is_refused_by_name() -> None:
    catalogue = Catalogue(keep=2)
    catalogue.add(manifest(3, step=1))
    with pytest.raises(ConflictingOfferError, match=r"'head'.*new lineage"):
        catalogue.find(manifest(-1, step=1, checksum=2))


def test_a_late_old_version_does_not_become_the_newest() -> None:
    catalogue = Catalogue(keep=1)
    catalogue.add(manifest(5, step=5))
    assert catalogue.add(manifest(4, step=4)) == [4]
    assert catalogue.newest == manifest(5, step=5)


@given(st.lists(st.integers(0, 30), unique=True), st.integers(1, 4))
def test_the_newest_are_kept_and_each_other_is_dropped_once(versions: list[int], keep: int) -> None:
    catalogue = Catalogue(keep)
    assert catalogue.newest is None
    dropped = [old for version in versions for old in catalogue.add(manifest(version, step=version))]
    held = sorted(versions)[-keep:]
    assert sorted(dropped + held) == sorted(versions)
    assert catalogue.next_version == max(versions, default=-1) + 1
    for version in versions:
        assert (catalogue.find(manifest(-1, step=version)) is not None) == (version in held)


def test_what_held_adapters_add_to_is_held_as_long_as_they_are() -> None:
    catalogue = Catalogue(keep=2)
    catalogue.add(manifest(0, step=0))
    adapters = [replace(manifest(step, step=step), base_version=0) for step in range(1, 6)]
    assert [catalogue.add(version) for version in adapters] == [[], [], [1], [2], [3]]
    assert catalogue.newest is not None
    assert catalogue.base_of(catalogue.newest) == manifest(0, step=0)
    assert catalogue.add(manifest(6, step=6)) == [4]
    assert sorted(catalogue.add(manifest(7, step=7))) == [0, 5]


def test_adapters_of_a_version_that_is_not_held_are_refused() -> None:
    catalogue = Catalogue(keep=2)
    assert catalogue.base_of(manifest(0, step=0)) is None
    catalogue.add(manifest(0, step=0))
    catalogue.add(replace(manifest(1, step=1), base_version=0))
    for missing in (7, 1):  # 1 is no set of whole weights itself
        with pytest.raises(BaseNotHeldError, match=f"version {missing}"):
            catalogue.base_of(replace(manifest(-1, step=2), base_version=missing))
