"""The versions held: the newest few, each for one (lineage, optimizer step), and what they add to.

Invariants: numbers only grow; a step offered again gets the version it has; a step never has two
different contents; the base of a held version is held.
"""

from __future__ import annotations

from tailrace_protos.weights import WeightManifest


class ConflictingOfferError(ValueError):
    """A step was offered again with other weights than before.

    Attributes: `policy_version` (the version that the step has), `tensor` (the first that differs).
    """

    def __init__(self, held: WeightManifest, tensor: str) -> None:
        super().__init__(
            f"step {held.optimizer_step} of lineage {held.lineage!r} is policy version "
            f"{held.policy_version} already and differs in tensor {tensor!r}: a learner that starts "
            "again must use a new lineage"
        )
        self.policy_version = held.policy_version
        self.tensor = tensor


class BaseNotHeldError(ValueError):
    """Adapters were offered for a version that nobody could fetch. Attribute: `base_version`."""

    def __init__(self, base_version: int) -> None:
        super().__init__(
            f"policy version {base_version}, which these adapters add to, is not held any more: offer "
            "whole weights first"
        )
        self.base_version = base_version


class Catalogue:
    """The newest `keep` versions, and the bases of those that are adapters."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._held: dict[int, WeightManifest] = {}
        self._highest = -1

    @property
    def newest(self) -> WeightManifest | None:
        """The version that servers should have."""
        return self._held[max(self._held)] if self._held else None

    @property
    def next_version(self) -> int:
        """The lowest number that cannot have been used, as far as is known here."""
        return self._highest + 1

    def find(self, offered: WeightManifest) -> WeightManifest | None:
        """The held version of an offer that is a repetition; `ConflictingOfferError` if it differs."""
        step = (offered.lineage, offered.optimizer_step)
        for held in self._held.values():
            if (held.lineage, held.optimizer_step) == step:
                _check_same(held, offered)
                return held
        return None

    def base_of(self, manifest: WeightManifest) -> WeightManifest | None:
        """What `manifest` adds to, None if it is whole; `BaseNotHeldError` if that is gone."""
        if manifest.base_version is None:
            return None
        base = self._held.get(manifest.base_version)
        if base is None or base.base_version is not None:
            raise BaseNotHeldError(manifest.base_version)
        return base

    def add(self, manifest: WeightManifest) -> list[int]:
        """Hold a version; returns the versions that are not held any more, which may include it."""
        self._held[manifest.policy_version] = manifest
        self._highest = max(self._highest, manifest.policy_version)
        kept = sorted(self._held)[-self._keep :]
        needed = {*kept, *(self._held[policy_version].base_version for policy_version in kept)}
        dropped = [policy_version for policy_version in self._held if policy_version not in needed]
        for policy_version in dropped:
            del self._held[policy_version]
        return dropped


def _check_same(held: WeightManifest, offered: WeightManifest) -> None:
    if held.tensors == offered.tensors:
        return
    known = set(held.tensors)
    changed = [entry.name for entry in offered.tensors if entry not in known]
    raise ConflictingOfferError(held, changed[0] if changed else held.tensors[-1].name)
