"""A version's bytes from where they are nearest: shared memory on the same host, or ZMQ."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tailrace.log import get_logger
from tailrace.weights.chunks import ChunkFetch
from tailrace.weights.errors import WeightsGoneError
from tailrace.weights.segment import map_segment
from tailrace.weights.tensors import verify
from tailrace_protos.weights import WeightManifest, WeightSource

log = get_logger(__name__)


def map_source(
    manifest: WeightManifest, source: WeightSource, host_id: str, folder: Path | None = None
) -> memoryview | None:
    """The source's own memory, or None when it cannot be mapped from here."""
    if source.host_id != host_id or not source.shm_name:
        return None
    try:
        return map_segment(source.shm_name, manifest.num_bytes, folder)
    except WeightsGoneError as error:
        log.info(
            "weights not in shared memory", policy_version=manifest.policy_version, reason=error.reason
        )
        return None


async def copy_verified(
    manifest: WeightManifest,
    source: WeightSource,
    host_id: str,
    into: memoryview,
    folder: Path | None = None,
) -> None:
    """Fill `into` and check every tensor in it; the source may change or die afterwards."""
    mapped = map_source(manifest, source, host_id, folder)
    if mapped is None:
        await ChunkFetch(source, manifest, into).run()
    else:
        await asyncio.to_thread(_copy, mapped, into)
    await asyncio.to_thread(verify, manifest, into)


def _copy(mapped: memoryview, into: memoryview) -> None:
    into[:] = mapped
