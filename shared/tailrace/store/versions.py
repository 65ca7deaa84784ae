"""Policy versions: integers that are never used twice, and what each of them stands for."""

from __future__ import annotations

import msgspec

from tailrace.store import scripts
from tailrace.store.connection import StoreConnection
from tailrace_protos.subjects import redis_prefix
from tailrace_protos.weights import WeightManifest


class Versions:
    """The version book of one run; its only writer is weight_sync."""

    def __init__(self, redis: StoreConnection, run: str) -> None:
        self._redis = redis
        self._prefix = redis_prefix(run)

    async def allocate(self, lineage: str, optimizer_step: int, *, at_least: int = 0) -> int:
        """The version of a lineage's step: a fresh one, or the one it got before."""
        version: int = await self._redis.pipeline.script(
            scripts.ALLOCATE_VERSION, self._prefix, f"{lineage}/{optimizer_step}", at_least
        )
        return version

    async def record(self, manifest: WeightManifest) -> None:
        """Write down what a version stands for."""
        entry = msgspec.msgpack.encode((manifest.lineage, manifest.optimizer_step))
        await self._redis.pipeline.command(
            "HSET", f"{self._prefix}versions", manifest.policy_version, entry
        )

    async def all(self) -> dict[int, tuple[str, int]]:
        """policy_version -> (lineage, optimizer step) of all versions recorded."""
        entries = await self._redis.read_hash(f"{self._prefix}versions")
        kind = tuple[str, int]
        return {
            int(version): msgspec.msgpack.decode(entry, type=kind) for version, entry in entries.items()
        }
