"""What weight_sync needs of the world."""

from __future__ import annotations

from typing import Protocol

from tailrace_protos.weights import WeightManifest, WeightsApplied, WeightSource


class VersionBook(Protocol):
    """Where versions are numbered and what became of them is written down."""

    async def allocate(self, lineage: str, optimizer_step: int, at_least: int) -> int:
        """A number never used before; the same one for the same step."""

    async def record(self, manifest: WeightManifest) -> None:
        """Write down that a version is published; repeating it changes nothing."""

    async def record_applied(self, report: WeightsApplied) -> None:
        """Write down that a server serves a version; repeating it changes nothing."""

    async def lineages(self) -> frozenset[str]:
        """All lineages that published in this run."""


class Copy(Protocol):
    """A verified copy of offered weights that has no version yet."""

    def seal(self, manifest: WeightManifest) -> None:
        """Make it the copy of `manifest.policy_version`: it survives this process from now on."""

    def discard(self) -> None:
        """Give its memory back."""


class Vault(Protocol):
    """Where the versions' bytes are kept and handed out from."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all versions held."""

    async def copy(self, manifest: WeightManifest, source: WeightSource) -> Copy:
        """Copy offered weights and verify the copy."""

    def source(self, policy_version: int) -> WeightSource:
        """Where others fetch a version."""

    def drop(self, policy_version: int) -> None:
        """Give a version's memory back."""
