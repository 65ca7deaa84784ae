"""The versions held: the newest few, each for one (lineage, optimizer step).

Invariants: numbers only grow; a step offered again gets the version it has; a step never has two
different contents.
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


class Catalogue:
    """The newest `keep` versions."""

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

    def add(self, manifest: WeightManifest) -> list[int]:
        """Hold a version; returns the versions that are not held any more, which may include it."""
        self._held[manifest.policy_version] = manifest
        self._highest = max(self._highest, manifest.policy_version)
        dropped = sorted(self._held)[: -self._keep]
        for policy_version in dropped:
            del self._held[policy_version]
        return dropped


def _check_same(held: WeightManifest, offered: WeightManifest) -> None:
    if held.tensors == offered.tensors:
        return
    known = set(held.tensors)
    changed = [entry.name for entry in offered.tensors if entry not in known]
    raise ConflictingOfferError(held, changed[0] if changed else held.tensors[-1].name)
