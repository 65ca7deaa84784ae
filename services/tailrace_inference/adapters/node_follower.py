"""Follower's side of a server on several nodes: the way to its leader, and the versions that it holds.

Invariants: a file of a version has its name once it is whole and verified; the newest two are kept.
"""

import mmap
import os
from pathlib import Path
from typing import NoReturn

import xxhash

from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.weights.background import in_background
from tailrace.weights.chunks import ChunkFetch, Holding
from tailrace.weights.errors import ChecksumError, WeightsError
from tailrace_inference.adapters.node_link import (
    FetchVersion,
    Hello,
    LinkLostError,
    Node,
    NodeLink,
    VersionHeld,
    Welcome,
)
from tailrace_inference.adapters.staging import NUM_FILES
from tailrace_inference.ports import EngineFailedError

log = get_logger(__name__)


class HeldVersions:
    """Files of the newest versions, in this node's memory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[Path] = []

    async def fetch(self, order: FetchVersion) -> None:
        """Fetches and verifies a file; raises `OSError` or `WeightsError`."""
        arriving = self._folder / ".arriving"
        final = self._folder / Path(order.name).name
        if final in self._files:
            self._files.remove(final)
            final.rename(arriving)
        elif len(self._files) == NUM_FILES:
            self._files.pop(0).rename(arriving)  # memory in use costs less than fresh memory
        data = _mapped(arriving, order.num_bytes)
        into = Holding(data, complete=False)
        await ChunkFetch(order.source, order.policy_version, into).run()
        if await in_background(xxhash.xxh3_64_intdigest, data) != order.checksum:
            raise ChecksumError(order.name, order.policy_version)
        self._files.append(arriving.rename(final))


def _mapped(path: Path, num_bytes: int) -> memoryview:
    """Maps a file of this size; raises `OSError` if there is no room for it."""
    fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, num_bytes)
        os.posix_fallocate(fd, 0, num_bytes)  # a write through the mapping could only be killed
        return memoryview(mmap.mmap(fd, num_bytes))
    finally:
        os.close(fd)


class LeaderLink:
    """A follower's connection to its leader, and what the leader asks for."""

    def __init__(self, node: Node, folder: Path) -> None:
        """`folder`: for the versions."""
        self._node = node
        self._versions = HeldVersions(folder)
        self._link: NodeLink | None = None

    async def join(self) -> Welcome:
        """Tries without limit until a leader has gathered all nodes."""
        backoff = Backoff(0.1, 2.0)
        while True:
            try:
                link = self._link = await NodeLink.connect(self._node)
                await link.send(Hello(self._node.rank, self._node.num))
                welcome = await link.receive()
                assert isinstance(welcome, Welcome)
                return welcome
            except OSError as error:
                log.info("no leader yet", host=self._node.host, error=str(error))
                self.close()
                await backoff.sleep()

    async def obey(self) -> NoReturn:
        """Fetches the versions that the leader names; raises `EngineFailedError` once it is gone."""
        assert self._link is not None, "obey before join"
        try:
            while True:
                order = await self._link.receive()
                if isinstance(order, FetchVersion):
                    await self._link.send(await self._fetch(order))
        except LinkLostError as error:
            raise EngineFailedError(f"the leader of this server is lost: {error}") from error

    async def _fetch(self, order: FetchVersion) -> VersionHeld:
        try:
            await self._versions.fetch(order)
        except (OSError, WeightsError) as error:
            log.error("version not fetched", policy_version=order.policy_version, error=str(error))
            return VersionHeld(order.number, f"{type(error).__name__}: {error}")
        log.info("version fetched", policy_version=order.policy_version)
        return VersionHeld(order.number)

    def close(self) -> None:
        """Closes the connection."""
        if self._link is not None:
            self._link.close()
            self._link = None
