"""Three ways to ask for a reply: the engine itself, the gateway, and a server that only says hello."""

from __future__ import annotations

import itertools
import time
from contextlib import AsyncExitStack
from typing import NamedTuple, Protocol

import aiohttp
import psutil

from benchmarks.gateway.model import renderer
from benchmarks.gateway.talks import NUM_TURNS, Talk
from benchmarks.gateway.world import World
from tailrace.channel import ZmqGenerateClient
from tailrace_protos.base import pack_int32
from tailrace_protos.chat import ChatMessage
from tailrace_protos.generation import GenerateRequest
from tailrace_protos.session import SessionOpened


class Caller(Protocol):
    """One conversation at a time; `call` waits for one reply."""

    async def begin(self, talk: Talk) -> None:
        """A new conversation; not measured."""

    async def call(self, turn: int) -> None:
        """One reply."""


class DirectCaller:
    """Over the generation channel, with prompts that were rendered beforehand."""

    def __init__(self, world: World, client: ZmqGenerateClient, name: str) -> None:
        self._engine = world.engine
        self._client = client
        self._ids = map(f"{name}.{{}}".format, itertools.count())
        self._prompts: list[memoryview] = []

    async def begin(self, talk: Talk) -> None:
        """Render all prompts."""
        self._prompts = [
            pack_int32(
                renderer().opening_ids(
                    [ChatMessage(one["role"], one["content"]) for one in talk.messages(turn)]
                )
            )
            for turn in range(NUM_TURNS)
        ]

    async def call(self, turn: int) -> None:
        """See `Caller`."""
        name = next(self._ids)
        request = GenerateRequest(name, name, self._prompts[turn], 256)
        await self._client.generate(self._engine, request).collect()


class HttpCaller:
    """Through HTTP: to the gateway with a session for each conversation, or to `url` without any."""

    def __init__(self, world: World, http: aiohttp.ClientSession, url: str = "") -> None:
        self._world = world
        self._http = http
        self._url = url
        self._session: SessionOpened | None = None
        self._bodies: list[dict[str, object]] = []

    async def begin(self, talk: Talk) -> None:
        """Open a session."""
        self._bodies = [{"model": "m", "messages": talk.messages(turn)} for turn in range(NUM_TURNS)]
        if not self._url:
            self._session = await self._world.open()

    async def call(self, turn: int) -> None:
        """See `Caller`."""
        session = self._session
        base_url = session.base_url if session else self._url
        headers = {"authorization": f"Bearer {session.api_key if session else 'none'}"}
        url = f"{base_url}/chat/completions"
        async with self._http.post(url, json=self._bodies[turn], headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            await answer.read()


class Callers:
    """Makes callers of each path and says which process answers them."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._stack = AsyncExitStack()
        self._client = ZmqGenerateClient()
        self._numbers = itertools.count()
        self.servers: dict[str, psutil.Process] = {
            "direct": world.engine_process,
            "hello": world.hello,
            "gateway": world.gateway,
        }

    async def __aenter__(self) -> Callers:
        await self._client.start()
        self._stack.push_async_callback(self._client.close)
        self._http = await self._stack.enter_async_context(unlimited_http())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def make(self, path: str) -> Caller:
        """A caller of its own."""
        if path == "direct":
            return DirectCaller(self._world, self._client, f"direct.{next(self._numbers)}")
        return HttpCaller(self._world, self._http, self._world.hello_url if path == "hello" else "")


class Cpu(NamedTuple):
    """Processor time of a process since the beginning, in seconds."""

    of_s: float
    at_s: float

    @classmethod
    def now(cls, process: psutil.Process) -> Cpu:
        """As far as the system has counted: in steps of 10 ms."""
        times = process.cpu_times()
        return cls(times.user + times.system, time.perf_counter())


def unlimited_http() -> aiohttp.ClientSession:
    """A client that lets as many requests wait as there are."""
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0)
    return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
