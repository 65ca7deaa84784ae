"""Leader's side of a server on several nodes: gathers the followers, and gives each version to them.

Invariants: the engine starts once every follower is there; a version counts as staged once every
follower has its file; a follower that is lost ends the group, which then starts again as a whole.
"""

import asyncio
import itertools
import mmap
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import xxhash

from tailrace.log import get_logger
from tailrace.weights.background import in_background
from tailrace.weights.chunks import ChunkServer, Holding
from tailrace_inference.adapters.node_link import (
    FetchVersion,
    Hello,
    LinkLostError,
    Node,
    NodeLink,
    VersionHeld,
    Welcome,
)
from tailrace_inference.ports import NotStagedError
from tailrace_protos.weights import WeightSource

log = get_logger(__name__)

_GIVE_S = 60.0  # deadline of a version, and the time of its bytes at the rate below
_LEAST_BYTES_PER_S = 20e6
_LOSS_TOLD_S = 10.0  # a dead node breaks the collectives of the others before its link is seen to end


class _Follower:
    """A follower that has said hello."""

    def __init__(self, rank: int, link: NodeLink) -> None:
        self.rank = rank
        self.link = link
        self.replies: dict[int, asyncio.Future[VersionHeld]] = {}  # by number of the order


class NodeGroup:
    """Followers of one leader."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._followers: dict[int, _Follower] = {}
        self._complete = asyncio.Event()
        self._numbers = itertools.count()
        self._given: tuple[int, Holding] | None = None
        self._chunks = ChunkServer(self._held, bind_host=node.bind_host, advertise_host=node.host)
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def gather(self, seed: int) -> Welcome:
        """Waits without limit until all followers are there, and lets them start the engine."""
        self._server = await asyncio.start_server(
            self._serve, self._node.bind_host, self._node.port, reuse_address=True
        )
        await self._chunks.start()
        log.info("waiting for the other nodes of this server", num_nodes=self._node.num)
        await self._complete.wait()
        welcome = Welcome(_free_port(self._node.bind_host), seed)
        for follower in self._followers.values():
            await follower.link.send(welcome)
        return welcome

    async def give(self, policy_version: int, path: Path) -> None:
        """Waits until every follower has this file; raises `NotStagedError`."""
        with path.open("rb") as file:
            data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        checksum = await in_background(xxhash.xxh3_64_intdigest, data)
        source = WeightSource("", "", self._chunks.endpoint, self._chunks.public_key)
        order = FetchVersion(
            next(self._numbers), policy_version, path.name, data.nbytes, checksum, source
        )
        self._given = policy_version, Holding(data, complete=True)
        try:
            async with asyncio.timeout(_GIVE_S + data.nbytes / _LEAST_BYTES_PER_S):
                await asyncio.gather(*(self._give(each, order) for each in self._followers.values()))
        except TimeoutError as error:
            raise NotStagedError(policy_version, "a node does not end its fetch") from error
        except LinkLostError as error:
            reason = self.lost.result() if self.lost.done() else str(error)
            raise NotStagedError(policy_version, reason) from error
        finally:
            self._given = None

    async def _give(self, follower: _Follower, order: FetchVersion) -> None:
        reply: asyncio.Future[VersionHeld] = asyncio.get_running_loop().create_future()
        follower.replies[order.number] = reply
        try:
            await follower.link.send(order)
            either: set[asyncio.Future[Any]] = {reply, self.lost}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            del follower.replies[order.number]
        if not reply.done():
            raise LinkLostError(self.lost.result())
        if error := reply.result().error:
            raise NotStagedError(order.policy_version, f"node {follower.rank}: {error}")

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until its end."""
        link = NodeLink(reader, writer)
        rank = 0
        try:
            hello = await link.receive()
            if not isinstance(hello, Hello) or not self._is_new(hello):
                log.warning("a node is refused", said=repr(hello), num_nodes=self._node.num)
                return
            rank = hello.rank
            follower = self._followers[rank] = _Follower(rank, link)
            if len(self._followers) == self._node.num - 1:
                self._complete.set()
            while True:
                message = await link.receive()
                if isinstance(message, VersionHeld) and message.number in follower.replies:
                    follower.replies[message.number].set_result(message)
        except LinkLostError as error:
            if rank:
                self._lose(rank, str(error))
        finally:
            link.close()

    def _is_new(self, hello: Hello) -> bool:
        in_range = 0 < hello.rank < self._node.num == hello.num_nodes
        return in_range and hello.rank not in self._followers

    def _lose(self, rank: int, reason: str) -> None:
        if not self._complete.is_set():  # it may come again
            self._followers.pop(rank, None)
        elif not self.lost.done():
            self.lost.set_result(f"node {rank} of this server is lost: {reason}")

    def _held(self, policy_version: int, is_delta: bool) -> Holding | None:
        given = self._given
        return given[1] if given and given[0] == policy_version and not is_delta else None

    async def close(self) -> None:
        """Ends the followers."""
        if not self.lost.done():
            self.lost.set_result("closed")
        for follower in self._followers.values():
            follower.link.close()
        self._server.close()
        await self._chunks.stop()


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        port: int = server.getsockname()[1]
        return port


async def gather_nodes(node: Node, on_lost: Callable[[str], None]) -> tuple[NodeGroup | None, Welcome]:
    """Waits for the other nodes, if there are any; `on_lost` gets the reason once one is lost."""
    seed = int.from_bytes(os.urandom(4), "little") >> 1
    if node.num == 1:
        return None, Welcome(0, seed)
    group = NodeGroup(node)
    group.lost.add_done_callback(lambda lost: on_lost(lost.result()))
    return group, await group.gather(seed)


async def cause_of(failure: str, group: NodeGroup | None) -> str:
    """Reason of a failure that was seen here: the loss of a node that is told soon, or else itself."""
    if group is None:
        return failure
    await asyncio.wait({group.lost}, timeout=_LOSS_TOLD_S)
    return group.lost.result() if group.lost.done() else failure
