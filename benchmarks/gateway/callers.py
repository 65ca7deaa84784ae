"""Three ways to ask for a reply: the engine itself, the gateway, and a server that only says hello."""

from __future__ import annotations

import itertools
import time
from contextlib import AsyncExitStack
from typing import NamedTuple, Protocol

import psutil

from benchmarks.gateway.lean_http import LeanHttp, post
from benchmarks.gateway.model import renderer
from benchmarks.gateway.talks import NUM_TURNS, Talk
from benchmarks.gateway.world import World
from tailrace.channel import ZmqGenerateClient
from tailrace_protos.base import pack_int32
from tailrace_protos.chat import ChatMessage
from tailrace_protos.generation import GenerateRequest


class Caller(Protocol):
    """One conversation at a time; `call` waits for one reply."""

    async def begin(self, talk: Talk) -> None:
        """A new conversation; not measured."""

    async def call(self, turn: int) -> None:
        """One reply."""

    async def end(self) -> None:
        """No more calls."""


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

    async def end(self) -> None:
        """See `Caller`."""


class HttpCaller:
    """Through HTTP: to the gateway with a session for each conversation, or to `url` without any."""

    def __init__(self, world: World, url: str = "") -> None:
        self._world = world
        self._url = url
        self._http: LeanHttp | None = None
        self._requests: list[bytes] = []

    async def begin(self, talk: Talk) -> None:
        """Open a session, write all requests."""
        base_url, key = self._url, "none"
        if not base_url:
            session = await self._world.open()
            base_url, key = session.base_url, session.api_key
        url = f"{base_url}/chat/completions"
        self._requests = [
            post(url, key, {"model": "m", "messages": talk.messages(turn)}) for turn in range(NUM_TURNS)
        ]
        if self._http is None:
            self._http = await LeanHttp.connect(url)

    async def call(self, turn: int) -> None:
        """See `Caller`."""
        assert self._http is not None
        await self._http.ask(self._requests[turn])

    async def end(self) -> None:
        """See `Caller`."""
        if self._http is not None:
            self._http.close()


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
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    def make(self, path: str) -> Caller:
        """A caller of its own."""
        if path == "direct":
            return DirectCaller(self._world, self._client, f"direct.{next(self._numbers)}")
        return HttpCaller(self._world, self._world.hello_url if path == "hello" else "")


class Cpu(NamedTuple):
    """Processor time of a process since the beginning, in seconds."""

    of_s: float
    at_s: float

    @classmethod
    def now(cls, process: psutil.Process) -> Cpu:
        """As far as the system has counted: in steps of 10 ms."""
        times = process.cpu_times()
        return cls(times.user + times.system, time.perf_counter())
