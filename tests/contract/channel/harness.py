"""Harness of both transports of the generation channel: hand-made engines and two ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import nats
import numpy as np
from nats.aio.client import Client as NatsConnection

from tailrace.channel import (
    Address,
    ChunkSink,
    ClientChannelConfig,
    GenerateClient,
    GenerateHandler,
    GenerateServer,
    NatsGenerateClient,
    NatsGenerateServer,
    ServerChannelConfig,
    ZmqGenerateClient,
    ZmqGenerateServer,
)
from tailrace_protos.base import pack_float32, pack_int32
from tailrace_protos.generation import (
    FinishReason,
    GenerateRequest,
    TokenChunk,
    TokenSpan,
)

# Ends that take nobody for lost because a busy machine stops it, and ends that soon do.
STEADY = ClientChannelConfig(keepalive_s=0.05, silence_s=60.0)
STEADY_SERVER = ServerChannelConfig(keepalive_s=0.05, silence_s=60.0)
QUICK = ClientChannelConfig(keepalive_s=0.05, silence_s=2.0)
QUICK_SERVER = ServerChannelConfig(keepalive_s=0.05, silence_s=2.0)


def request(call_id: str, num_prompt: int = 10, max_new_tokens: int = 8) -> GenerateRequest:
    """A call with a recognisable prompt."""
    prompt = np.arange(num_prompt, dtype=np.int32)
    return GenerateRequest(call_id, "episode", pack_int32(prompt), max_new_tokens)


def chunk(
    call_id: str,
    start: int,
    count: int,
    finish: FinishReason | None = None,
    policy_version: int = 1,
    num_cached_tokens: int = 0,
) -> TokenChunk:
    """Tokens `start`, `start + 1`, ... with log-probabilities -0.5 times their id."""
    ids = np.arange(start, start + count, dtype=np.int32)
    return TokenChunk(
        call_id,
        pack_int32(ids),
        pack_float32((-0.5 * ids).astype(np.float32)),
        (TokenSpan(policy_version, "", count),) if count else (),
        finish,
        num_cached_tokens=num_cached_tokens,
    )


class CountingEngine:
    """Answers at once with `max_new_tokens` tokens, one chunk each."""

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        last = request.max_new_tokens - 1
        for index in range(request.max_new_tokens):
            sink.send(chunk(request.call_id, index, 1, FinishReason.LENGTH if index == last else None))

    def abort(self, call_id: str) -> None:
        """Calls are over before they could be aborted."""

    def release_prefixes(self, episode_ids: tuple[str, ...]) -> None:
        """No context is kept."""


@dataclass
class HeldEngine:
    """Keeps calls open until the test says what to answer; aborted calls end as engines end them."""

    sinks: dict[str, ChunkSink] = field(default_factory=dict)
    requests: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    ends_aborted: bool = True
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        self.sinks[request.call_id] = sink
        self.requests.append(request)
        self._changed.set()

    def abort(self, call_id: str) -> None:
        self.aborted.append(call_id)
        if self.ends_aborted:
            self.sinks[call_id].send(chunk(call_id, 0, 0, FinishReason.ABORT))
        self._changed.set()

    def release_prefixes(self, episode_ids: tuple[str, ...]) -> None:
        self.released.extend(episode_ids)
        self._changed.set()

    async def until(self, condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Return when `condition` holds after a submit, an abort or a release."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def got(self, *call_ids: str) -> None:
        """Return when these calls have arrived."""
        await self.until(lambda: all(call_id in self.sinks for call_id in call_ids))


@dataclass
class Ends:
    """Makes clients and servers of one transport that can reach each other, and closes them."""

    transport: str
    nats_url: str
    run: str
    directory: Path
    _closers: list[Callable[[], Awaitable[object]]] = field(default_factory=list)

    async def connection(self) -> NatsConnection:
        """A NATS connection of its own."""
        connection = await nats.connect(
            self.nats_url, reconnect_time_wait=0.1, max_reconnect_attempts=-1
        )
        self._closers.append(connection.close)
        return connection

    def address(self, name: str = "s1") -> Address:
        """Address of the server of this name."""
        return Address(name, f"{self.run}.{name}", f"ipc://{self.directory}/{name}.sock")

    async def client(self, config: ClientChannelConfig = STEADY) -> GenerateClient:
        """A started client."""
        client: GenerateClient
        if self.transport == "nats":
            client = NatsGenerateClient(await self.connection(), config)
        else:
            client = ZmqGenerateClient(config)
        await client.start()
        self._closers.append(client.close)
        return client

    async def server(
        self, name: str = "s1", config: ServerChannelConfig = STEADY_SERVER
    ) -> GenerateServer:
        """A server not started yet; the test starts it with its engine."""
        address = self.address(name)
        server: GenerateServer
        if self.transport == "nats":
            server = NatsGenerateServer(await self.connection(), address.nats_subject, config)
        else:
            server = ZmqGenerateServer(address.zmq_endpoint, config)
        return server

    async def serve(
        self, handler: GenerateHandler, config: ServerChannelConfig = STEADY_SERVER, *, name: str = "s1"
    ) -> GenerateServer:
        """A server that runs until the end of the test, or until it is stopped."""
        server = await self.server(name, config)
        await server.start(handler)
        self._closers.append(server.stop)
        return server

    def on_close(self, closer: Callable[[], Awaitable[object]]) -> None:
        """Await this at the end of the test."""
        self._closers.append(closer)

    async def close(self) -> None:
        """Close everything, newest first."""
        for closer in reversed(self._closers):
            await closer()


@asynccontextmanager
async def peer_process(role: str, ends: Ends) -> AsyncIterator[asyncio.subprocess.Process]:
    """`peer_process.py` until the end of the block."""
    arguments = ("-m", "tests.contract.channel.peer_process", role, ends.transport, ends.nats_url)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        ends.run,
        str(ends.directory),
        cwd=Path(__file__).parents[3],
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(120):  # a busy machine starts it slowly
            assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
