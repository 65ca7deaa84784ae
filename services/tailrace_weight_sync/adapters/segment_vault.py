"""The vault: one sealed shared memory segment per version, also served over ZMQ."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from tailrace.log import get_logger
from tailrace.weights.chunks import ChunkServer
from tailrace.weights.copying import bulk, copy_verified
from tailrace.weights.errors import ChecksumError
from tailrace.weights.segment import Segment, SegmentFolder
from tailrace.weights.tensors import verify
from tailrace_protos.weights import WeightManifest, WeightSource

log = get_logger(__name__)


class SegmentCopy:
    """A verified copy that becomes a version when it is sealed."""

    def __init__(self, segment: Segment, held: dict[int, Segment]) -> None:
        self._segment = segment
        self._held = held

    def seal(self, manifest: WeightManifest) -> None:
        """Hold it as `manifest.policy_version`."""
        self._segment.seal(manifest)
        self._held[manifest.policy_version] = self._segment

    def discard(self) -> None:
        """Delete it."""
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
    ) -> None:
        self._host_id = host_id
        self._shm_folder = shm_folder
        self._folder = SegmentFolder(run, "weight_sync", shm_folder)
        self._held: dict[int, Segment] = {}
        self._server = ChunkServer(self.buffer, bind_host=bind_host, advertise_host=advertise_host)

    async def start(self) -> None:
        """Begin to serve other hosts."""
        await self._server.start()

    async def stop(self, *, delete: bool) -> None:
        """End serving; with `delete` the versions end with this process."""
        await self._server.stop()
        for segment in self._held.values():
            segment.close(delete=delete)
        self._held.clear()

    @property
    def num_bytes(self) -> int:
        """Bytes of all versions held."""
        return sum(segment.num_bytes for segment in self._held.values())

    def buffer(self, policy_version: int) -> memoryview | None:
        """A version's bytes, if it is held."""
        segment = self._held.get(policy_version)
        return None if segment is None else segment.data

    async def copy(self, manifest: WeightManifest, source: WeightSource) -> SegmentCopy:
        """Copy offered weights into a segment of our own and verify that copy."""
        segment = await copy_verified(manifest, source, self._host_id, self._folder, self._shm_folder)
        return SegmentCopy(segment, self._held)

    def source(self, policy_version: int) -> WeightSource:
        """Where others fetch a version."""
        return WeightSource(
            host_id=self._host_id,
            shm_name=self._held[policy_version].name,
            zmq_endpoint=self._server.endpoint,
            zmq_public_key=self._server.public_key,
        )

    def drop(self, policy_version: int) -> None:
        """Give a version's memory back; servers that map it keep it until they are done."""
        segment = self._held.pop(policy_version, None)
        if segment is not None:
            segment.close(delete=True)

    async def adopt(self, lineages: Collection[str]) -> list[WeightManifest]:
        """Take over what a killed predecessor held, as far as it is whole and of these lineages."""
        adopted: list[WeightManifest] = []
        for manifest, segment in self._folder.adopt():
            if manifest.lineage in lineages and await _is_whole(manifest, segment.data):
                self._held[manifest.policy_version] = segment
                adopted.append(manifest)
            else:
                segment.close(delete=True)
        return adopted

    async def restore(self, manifest: WeightManifest, data: memoryview) -> bool:
        """Hold a version read from a snapshot; False when it is damaged."""
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
        log.warning("held weights damaged", error=str(error))
        return False
    return True
