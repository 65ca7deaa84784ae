"""TCP links that a test may disturb: a byte changes on the way, or what is sent stops to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_READ_BYTES = 1 << 16


@dataclass
class Fault:
    """One disturbance of a link, after so many bytes of one direction."""

    after_bytes: int
    is_upward: bool = False  # of what the side that connected sends
    flips: bool = False  # one byte changes, and the rest goes on
    holds_all: bool = False  # all connections stall, later ones too; else the one that got so far
    struck: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Links:
    """Links at `host` to the same ports of `target_host`, with at most one fault at a time.

    A fault counts the bytes of all links to the given ports together.
    """

    def __init__(self, host: str, target_host: str) -> None:
        self._host, self._target_host = host, target_host
        self._servers: dict[int, asyncio.Server] = {}
        self._connections: set[asyncio.Task[None]] = set()
        self._fault: Fault | None = None
        self._ports: frozenset[int] = frozenset()  # to which the fault belongs

    @property
    def ports(self) -> frozenset[int]:
        return frozenset(self._servers)

    async def open(self, endpoint: str) -> int:
        """Opens the link of `tcp://host:port`, once; returns its port."""
        port = int(endpoint.rsplit(":", 1)[1])
        if port not in self._servers:
            self._servers[port] = await asyncio.start_server(
                lambda reader, writer: self._accept(port, reader, writer), self._host, port
            )
        return port

    def _accept(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(port, reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def close(self) -> None:
        for server in self._servers.values():
            server.close()
        for connection in self._connections:
            connection.cancel()
        if self._connections:
            await asyncio.wait(self._connections)

    @contextmanager
    def disturbed(self, ports: frozenset[int], fault: Fault) -> Iterator[Fault]:
        """Disturbs the links to these ports within the block."""
        self._fault, self._ports = fault, ports
        try:
            yield fault
        finally:
            self._fault = None
            fault.over.set()

    async def _connect(
        self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            target_reader, target_writer = await asyncio.open_connection(self._target_host, port)
        except OSError:
            writer.close()
            return
        ways = [
            asyncio.create_task(self._carry(port, reader, target_writer, is_upward=True)),
            asyncio.create_task(self._carry(port, target_reader, writer, is_upward=False)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            writer.close()
            target_writer.close()

    async def _carry(
        self,
        port: int,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        is_upward: bool,
    ) -> None:
        try:
            while data := await reader.read(_READ_BYTES):
                writer.write(await self._disturb(port, bytearray(data), is_upward))
                await writer.drain()
        except OSError:
            return

    async def _disturb(self, port: int, data: bytearray, is_upward: bool) -> bytearray:
        """The data as it arrives, once it does."""
        fault = self._fault
        if fault is None or port not in self._ports or is_upward != fault.is_upward:
            return data
        if fault.struck.is_set():
            if fault.holds_all:
                await fault.over.wait()
            return data
        at, fault.after_bytes = fault.after_bytes, fault.after_bytes - len(data)
        if fault.after_bytes >= 0:
            return data
        fault.struck.set()
        if fault.flips:
            data[at] ^= 1 << at % 8
        else:
            await fault.over.wait()
        return data
