"""Connection of the nodes of one server: a leader, which serves, and followers, which only compute.

Both sides send something every `_ALIVE_S`; after `_SILENT_S` without a byte, or with a closed
connection, the other side counts as dead. Only the nodes of one server may reach the leader's port.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from tailrace_inference.ports import EngineRefusalError
from tailrace_protos.weights import WeightSource

_ALIVE_S = 0.5
_SILENT_S = 15.0
_SIZE_BYTES = 4


@dataclass(frozen=True)
class Node:
    """Place of this process among the nodes of its server; rank 0 leads, and listens at `port`."""

    num: int = 1
    rank: int = 0
    host: str = "127.0.0.1"  # of the leader
    port: int = 0

    @classmethod
    def from_env(cls, num_nodes: int, env: Mapping[str, str] = os.environ) -> "Node":
        """Reads `TAILRACE_NODE_RANK` and `TAILRACE_MASTER` (host:port) of one of several nodes."""
        if num_nodes == 1:
            return cls()
        rank = env.get("TAILRACE_NODE_RANK", "")
        if not rank.isdigit() or int(rank) >= num_nodes:
            raise EngineRefusalError(
                f"TAILRACE_NODE_RANK ({rank!r}) must be a number below inference.num_nodes "
                f"({num_nodes})"
            )
        host, _, port = env.get("TAILRACE_MASTER", "").rpartition(":")
        if not host or not port.isdigit():
            raise EngineRefusalError(
                f"inference.num_nodes is {num_nodes}: TAILRACE_MASTER must be host:port of the first"
            )
        return cls(num_nodes, int(rank), host, int(port))

    @property
    def is_local(self) -> bool:
        """Says whether all nodes are this machine."""
        return self.host in ("127.0.0.1", "localhost")

    @property
    def bind_host(self) -> str:
        """Address on which the leader listens."""
        return self.host if self.is_local else "0.0.0.0"


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a follower."""

    rank: int
    num_nodes: int


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The leader's answer, once all nodes are there: the engine starts."""

    port: int  # of the leader's host, where the engine's ranks meet
    seed: int  # all ranks sample with the same one


class FetchVersion(msgspec.Struct, frozen=True, tag="fetch"):
    """Tells a follower to fetch the file of a policy version."""

    number: int  # of this order
    policy_version: int
    name: str  # of the file, without its folder
    num_bytes: int
    checksum: int  # XXH3
    source: WeightSource


class VersionHeld(msgspec.Struct, frozen=True, tag="held"):
    """The follower has the file, or the error that prevents it."""

    number: int  # of the order
    error: str = ""


class _Alive(msgspec.Struct, frozen=True, tag="alive"):
    """Says nothing else."""


Message = Hello | Welcome | FetchVersion | VersionHeld
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Message | _Alive).decode


class LinkLostError(ConnectionError):
    """The other side is dead, or cannot be reached."""


class NodeLink:
    """One end of the connection; it says by itself that this side lives."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._beating = asyncio.create_task(self._beat(), name="node link")

    @classmethod
    async def connect(cls, node: Node) -> "NodeLink":
        """Connects to the leader; raises `OSError`."""
        return cls(*await asyncio.open_connection(node.host, node.port))

    async def send(self, message: Message) -> None:
        """Raises `LinkLostError`."""
        await self._send(message)

    async def receive(self) -> Message:
        """Waits for the next message as long as the other side lives; raises `LinkLostError`."""
        while True:
            try:
                async with asyncio.timeout(_SILENT_S):
                    size = int.from_bytes(await self._reader.readexactly(_SIZE_BYTES), "little")
                    message: Message | _Alive = _decode(await self._reader.readexactly(size))
            except TimeoutError:
                raise LinkLostError(f"silent for {_SILENT_S:g} s") from None
            except (OSError, asyncio.IncompleteReadError) as error:
                raise LinkLostError("the connection is closed") from error
            except msgspec.MsgspecError as error:
                raise LinkLostError(f"a message is malformed: {error}") from error
            if not isinstance(message, _Alive):
                return message

    async def _send(self, message: Message | _Alive) -> None:
        packed = _encode(message)
        try:
            self._writer.write(len(packed).to_bytes(_SIZE_BYTES, "little") + packed)
            await self._writer.drain()
        except OSError as error:
            raise LinkLostError("the connection is closed") from error

    async def _beat(self) -> None:
        with suppress(LinkLostError):  # `receive` hears it as well
            while True:
                await self._send(_Alive())
                await asyncio.sleep(_ALIVE_S)

    def close(self) -> None:
        """Closes the connection; the other side hears it at once."""
        self._beating.cancel()
        self._writer.close()
