"""Copies of a version's bytes: from shared memory of the same host, else over ZMQ."""

import asyncio
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import ParamSpec, TypeVar

from tailrace.log import get_logger
from tailrace.weights.chunks import ChunkFetch, Holding
from tailrace.weights.errors import WeightsGoneError
from tailrace.weights.segment import SegmentFolder, SharedSegment, open_segment
from tailrace.weights.tensors import verify
from tailrace_protos.weights import WeightManifest, WeightSource

log = get_logger(__name__)

P = ParamSpec("P")
R = TypeVar("R")

_SMALL_BYTES = 8 << 20  # takes about a millisecond, less than a thread on a busy machine


async def bulk(num_bytes: int, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Runs `work` on `num_bytes` bytes: in a thread, unless it is faster than the start of a thread."""
    if num_bytes <= _SMALL_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)


def open_source(
    manifest: WeightManifest, source: WeightSource, host_id: str, shm_folder: Path | None = None
) -> int | None:
    """Opens the source's shared memory; None when this process cannot reach it."""
    if source.host_id != host_id or not source.shm_name:
        return None
    try:
        return open_segment(source.shm_name, manifest.num_bytes, shm_folder)
    except WeightsGoneError as error:
        version = manifest.policy_version
        log.info("weights not in shared memory", policy_version=version, reason=error.reason)
        return None


async def copy_verified(
    manifest: WeightManifest,
    source: WeightSource,
    host_id: str,
    folder: SegmentFolder,
    shm_folder: Path | None = None,
) -> SharedSegment:
    """Copies the bytes to a segment of this process and verifies all tensors.

    The source may change or disappear afterwards.
    """
    segment = await _copy(manifest, source, open_source(manifest, source, host_id, shm_folder), folder)
    with ExitStack() as undo:
        undo.callback(segment.close, delete=True)
        await bulk(manifest.num_bytes, verify, manifest, segment.data)
        undo.pop_all()
    return segment


async def _copy(
    manifest: WeightManifest, source: WeightSource, fd: int | None, folder: SegmentFolder
) -> SharedSegment:
    if fd is not None:
        try:
            return await bulk(manifest.num_bytes, folder.copy_of, fd, manifest.num_bytes)
        finally:
            os.close(fd)
    segment = folder.create(manifest.num_bytes)
    with ExitStack() as undo:
        undo.callback(segment.close, delete=True)
        await ChunkFetch(source, manifest.policy_version, Holding(segment.data, complete=False)).run()
        undo.pop_all()
    return segment
