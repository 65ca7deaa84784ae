"""The bytes of policy versions: in shared memory, over ZMQ, and on a volume.

Each version is one sealed segment of shared memory. Servers of this host map it, others fetch it over
ZMQ.
"""

import asyncio
import shutil
from collections.abc import Collection
from contextlib import ExitStack
from pathlib import Path

from tailrace.log import get_logger
from tailrace.weights.chunks import ChunkServer, Holding
from tailrace.weights.copying import bulk, copy_verified
from tailrace.weights.deltas import encode_delta, same_layout
from tailrace.weights.errors import ChecksumError
from tailrace.weights.files import remove_others, write_version
from tailrace.weights.segment import SegmentFolder, SharedSegment
from tailrace.weights.target_types import convert
from tailrace.weights.tensors import verify
from tailrace_protos.weights import WeightDelta, WeightManifest, WeightSource
from tailrace_weight_sync import metrics

log = get_logger(__name__)

_MAX_CHAIN = 4  # deltas; each lists its tensors in every announcement


class SegmentCopy:
    """Verified copy of offered weights; it becomes a version when it is sealed."""

    def __init__(self, segment: SharedSegment, held: dict[int, SharedSegment]) -> None:
        self._segment = segment
        self._held = held

    def seal(self, manifest: WeightManifest) -> None:
        """Holds it as `manifest.policy_version`, in the place of an earlier copy; it survives this
        process from now on. Servers that map the earlier one keep their mapping."""
        self._segment.seal(manifest)
        replaced = self._held.get(manifest.policy_version)
        self._held[manifest.policy_version] = self._segment
        if replaced is not None:
            replaced.close(delete=True)

    def discard(self) -> None:
        """Deletes the copy."""
        self._segment.close(delete=True)


class SegmentVault:
    """All versions held by this process."""

    def __init__(
        self,
        run: str,
        host_id: str,
        *,
        bind_host: str,
        advertise_host: str,
        shm_folder: Path | None = None,
        max_delta_share: float = 0.0,
        volume: Path | None = None,
        target: str = "",
    ) -> None:
        """`volume`: folder for files of the versions; None: there are none.

        `target`: declared type of its versions, empty for published ones.
        """
        self._volume = volume if volume is None or not target else volume / target
        self._files: dict[int, Path] = {}
        self._max_delta_share = max_delta_share
        self._deltas: list[tuple[WeightDelta, memoryview]] = []  # a chain to the newest version
        self._shm_folder = shm_folder
        role = f"weight_sync-{target}" if target else "weight_sync"
        self._folder = SegmentFolder(run, role, shm_folder)
        self._held: dict[int, SharedSegment] = {}
        self._host_id = host_id
        self._server = ChunkServer(self._served, bind_host=bind_host, advertise_host=advertise_host)

    async def start(self) -> None:
        """Starts to serve other hosts."""
        await self._server.start()

    async def stop(self, *, delete: bool) -> None:
        """Stops serving; with `delete` the versions are deleted too."""
        await self._server.stop()
        for segment in self._held.values():
            segment.close(delete=delete)
        self._held.clear()
        self._folder.forget_retired()

    @property
    def num_bytes(self) -> int:
        """Bytes of all versions held."""
        return sum(segment.num_bytes for segment in self._held.values())

    def buffer(self, policy_version: int) -> memoryview | None:
        """Bytes of a version, or None when it is not held."""
        segment = self._held.get(policy_version)
        return None if segment is None else segment.data

    def _served(self, policy_version: int, is_delta: bool) -> Holding | None:
        data = self.buffer(policy_version)
        if is_delta:
            made = (data for delta, data in self._deltas if delta.policy_version == policy_version)
            data = next(made, None)
        return None if data is None else Holding(data, complete=True)

    def serves(self, policy_version: int, is_delta: bool) -> bool:
        """Says whether other hosts can fetch a version, or the delta to it."""
        return self._served(policy_version, is_delta) is not None

    @property
    def makes_deltas(self) -> bool:
        """True if deltas to later versions may follow."""
        return self._max_delta_share > 0

    @property
    def deltas(self) -> tuple[WeightDelta, ...]:
        """Deltas for other hosts, each continuing the one before, up to the newest version."""
        return tuple(delta for delta, _ in self._deltas)

    async def add_delta(self, before: WeightManifest | None, after: WeightManifest) -> None:
        """Continues the chain of deltas by that between two held versions.

        Without servers on other hosts, and where both differ in their tensors, there is none. A chain
        that does not end at `before` is given up: a version that is offered again comes twice.
        """
        old = None if before is None else self.buffer(before.policy_version)
        new = self._held[after.policy_version].data
        wanted = self.makes_deltas and self._server.is_used
        if before is None or old is None or not wanted or not same_layout(before, after):
            self._deltas.clear()
            return
        if self._deltas and self._deltas[-1][0].policy_version != before.policy_version:
            self._deltas.clear()
        delta, payload = await bulk(after.num_bytes, encode_delta, before, after, old, new)
        self._deltas.append((delta, memoryview(payload)))
        self._shorten_chain(self._max_delta_share * after.num_bytes)

    def _shorten_chain(self, limit: float) -> None:
        """Forgets the oldest deltas beyond the longest chain and `limit` bytes."""
        del self._deltas[:-_MAX_CHAIN]
        while sum(each.num_bytes for each, _ in self._deltas) > limit:
            del self._deltas[0]

    async def write_file(self, manifest: WeightManifest) -> None:
        """Writes a held version to the volume; one without room there goes over ZMQ, and is counted."""
        if self._volume is None:
            return
        path = self._volume / f"{manifest.policy_version}" / "model.safetensors"
        data = self._held[manifest.policy_version].data
        try:
            await asyncio.to_thread(remove_others, self._volume, set(self._held))
            await asyncio.to_thread(write_version, path.parent, manifest, data)
        except OSError as error:
            metrics.FAILED_FILES.inc()
            log.error(
                "weights not written to the volume, servers fetch them over ZMQ: free space there, or "
                "lower weight_sync.keep_versions",
                policy_version=manifest.policy_version,
                volume=str(self._volume),
                num_bytes=manifest.num_bytes,
                error=str(error),
            )
        else:
            self._files[manifest.policy_version] = path

    async def copy(self, manifest: WeightManifest, source: WeightSource) -> SegmentCopy:
        """Copies offered weights into a segment of this process and verifies the copy."""
        segment = await copy_verified(manifest, source, self._host_id, self._folder, self._shm_folder)
        return SegmentCopy(segment, self._held)

    async def is_whole(self, manifest: WeightManifest) -> bool:
        """Says whether the bytes of a version still have its checksums."""
        return await _is_whole(manifest, self._held[manifest.policy_version].data)

    async def convert(
        self, manifest: WeightManifest, data: memoryview, plan: WeightManifest
    ) -> WeightManifest:
        """Holds the version `data` in the layout of `plan`; returns its manifest."""
        segment = self._folder.create(plan.num_bytes)
        copy = SegmentCopy(segment, self._held)
        with ExitStack() as undo:
            undo.callback(copy.discard)
            made = await bulk(manifest.num_bytes, convert, manifest, data, plan, segment.data)
            copy.seal(made)
            undo.pop_all()
        return made

    def source(self, policy_version: int) -> WeightSource:
        """Addresses at which other processes fetch a version."""
        return WeightSource(
            host_id=self._host_id,
            shm_name=self._held[policy_version].name,
            zmq_endpoint=self._server.endpoint,
            zmq_public_key=self._server.public_key,
            file=str(self._files.get(policy_version, "")),
        )

    @property
    def zmq_source(self) -> WeightSource:
        """Address at which other hosts fetch any version."""
        return WeightSource(self._host_id, "", self._server.endpoint, self._server.public_key)

    def drop(self, policy_version: int) -> None:
        """Deletes a version; servers that read it keep its bytes."""
        segment = self._held.pop(policy_version, None)
        if segment is not None:
            self._folder.retire(segment)
        file = self._files.pop(policy_version, None)
        if file is not None:
            shutil.rmtree(file.parent, ignore_errors=True)

    def sweep(self) -> None:
        """Deletes the segments of a killed predecessor."""
        self._folder.sweep()

    async def adopt(self, lineages: Collection[str]) -> list[WeightManifest]:
        """Takes over the undamaged versions of these lineages from a killed predecessor."""
        adopted: list[WeightManifest] = []
        for manifest, segment in self._folder.adopt():
            is_new = manifest.policy_version not in self._held
            if is_new and manifest.lineage in lineages and await _is_whole(manifest, segment.data):
                self._held[manifest.policy_version] = segment
                adopted.append(manifest)
            else:
                segment.close(delete=True)
        return adopted

    async def restore(self, manifest: WeightManifest, data: memoryview) -> bool:
        """Holds a version from a snapshot; False when it is damaged."""
        if data.nbytes != manifest.num_bytes or not await _is_whole(manifest, data):
            return False
        segment = self._folder.create(manifest.num_bytes)
        segment.data[:] = data
        SegmentCopy(segment, self._held).seal(manifest)
        return True


async def _is_whole(manifest: WeightManifest, data: memoryview) -> bool:
    try:
        await bulk(manifest.num_bytes, verify, manifest, data)
    except ChecksumError as error:
        log.warning("held weights are damaged", error=str(error))
        return False
    return True
