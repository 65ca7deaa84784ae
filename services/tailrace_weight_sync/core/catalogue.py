"""Held versions: the newest few, each of one (lineage, optimizer step), and their bases.

Invariants: version numbers only grow; a repeated offer of a step gets the version of that step; a step
never has two different contents; the base of a held version is held.
"""

from tailrace_protos.weights import WeightManifest


class ConflictingOfferError(ValueError):
    """A step is offered a second time, with different weights.

    Attributes: `policy_version` (of the first offer), `tensor` (the first that differs).
    """

    def __init__(self, held: WeightManifest, tensor: str) -> None:
        super().__init__(
            f"step {held.optimizer_step} of lineage {held.lineage!r} is already policy version "
            f"{held.policy_version}, and its tensor {tensor!r} differs: a restarted learner must use a "
            "new lineage"
        )
        self.policy_version = held.policy_version
        self.tensor = tensor


class BaseNotHeldError(ValueError):
    """Adapters are offered for a base that is not held. Attribute: `base_version`."""

    def __init__(self, base_version: int) -> None:
        super().__init__(
            f"policy version {base_version}, the base of these adapters, is no longer held: offer full "
            "weights first"
        )
        self.base_version = base_version


class Catalogue:
    """The newest `keep` versions, and the bases of versions that are adapters."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._held: dict[int, WeightManifest] = {}
        self._highest = -1

    @property
    def newest(self) -> WeightManifest | None:
        """The version that servers should serve."""
        return self._held[max(self._held)] if self._held else None

    @property
    def next_version(self) -> int:
        """The lowest number above all versions seen here."""
        return self._highest + 1

    def find(self, offered: WeightManifest) -> WeightManifest | None:
        """The held version of a repeated offer; `ConflictingOfferError` if the weights differ."""
        step = (offered.lineage, offered.optimizer_step)
        for held in self._held.values():
            if (held.lineage, held.optimizer_step) == step:
                _check_same(held, offered)
                return held
        return None

    def base_of(self, manifest: WeightManifest) -> WeightManifest | None:
        """The base of adapters, None for full weights; raises `BaseNotHeldError` if it is not held."""
        if manifest.base_version is None:
            return None
        base = self._held.get(manifest.base_version)
        if base is None or base.base_version is not None:
            raise BaseNotHeldError(manifest.base_version)
        return base

    def add(self, manifest: WeightManifest) -> list[int]:
        """Adds a version; returns the versions to drop, which may include the new one."""
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
