"""A run around real gateways: real NATS, Redis, ZMQ and HTTP; a model that says what a test wants."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import yaml

from tailrace.channel import Address, ChunkSink, ZmqGenerateServer
from tailrace.config import Endpoints, load_experiment, run_config
from tailrace.runtime import Args, Service
from tailrace.store import Blobs, StoreConnection, connect
from tailrace_gateway.__main__ import build
from tailrace_protos import subjects
from tailrace_protos.base import as_int32, pack_float32, pack_int32
from tailrace_protos.generation import (
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
    TokenSpan,
)
from tailrace_protos.session import (
    CloseSession,
    ExportSession,
    ExportStyle,
    OpenSession,
    SessionClosed,
    SessionExport,
    SessionLimits,
    SessionOpened,
)
from tests.integration.agents.world import FakeScheduler, end
from tests.world.byte_model import model_card, renderer
from tests.world.servers import ServerProcess, free_port
from tests.world.serving import eventually, make_service, serving

_SAMPLING = SamplingParams()
ADMIN_KEY = "the-admin-key-of-these-tests"


class ScriptedModel:
    """Answers with `reply(prompt text, request)`; a reply ends its turn unless it fills the budget.

    With `hold` set, calls wait for `release`. `chunk` tokens go out at a time.
    """

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.aborted: list[str] = []
        self.reply: Callable[[str, GenerateRequest], str] = lambda prompt, request: "Hello there."
        self.hold = False
        self.chunk = 1_000_000
        self.num_before_hold = 0  # tokens that go out although calls are held
        self._held: dict[str, tuple[GenerateRequest, ChunkSink]] = {}

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        self.requests.append(request)
        if self.hold:
            self._held[request.call_id] = (request, sink)
            if self.num_before_hold:
                self._send(request, sink, self._ids(request)[: self.num_before_hold], None)
        else:
            self._answer(request, sink, 0)

    def abort(self, call_id: str) -> None:
        self.aborted.append(call_id)
        held = self._held.pop(call_id, None)
        if held is not None:
            held[1].send(TokenChunk(call_id, finish_reason=FinishReason.ABORT))

    def release(self) -> None:
        """Answer what is held."""
        self.hold = False
        held, self._held = self._held, {}
        for request, sink in held.values():
            self._answer(request, sink, self.num_before_hold)

    @property
    def num_held(self) -> int:
        return len(self._held)

    def prompt(self, index: int = -1) -> str:
        """The text of a prompt."""
        return text_of(as_int32(self.requests[index].prompt_ids))

    def _answer(self, request: GenerateRequest, sink: ChunkSink, num_sent: int) -> None:
        ids = self._ids(request)
        is_cut = len(ids) > request.max_new_tokens
        reason, stop = (FinishReason.LENGTH, None) if is_cut else self._ending(request)
        ids = ids[num_sent : request.max_new_tokens]
        while len(ids) > self.chunk:
            self._send(request, sink, ids[: self.chunk], None)
            ids = ids[self.chunk :]
        self._send(request, sink, ids, reason, stop)

    def _ids(self, request: GenerateRequest) -> list[int]:
        text = self.reply(text_of(as_int32(request.prompt_ids)), request)
        places = [text.index(stop) + len(stop) for stop in request.sampling.stop if stop in text]
        if places:
            return [int(i) for i in renderer().encode(text[: min(places)])]
        return [int(i) for i in renderer().reply_ids(text)]

    def _ending(self, request: GenerateRequest) -> tuple[FinishReason, int | str | None]:
        text = self.reply(text_of(as_int32(request.prompt_ids)), request)
        found = [(text.index(stop), stop) for stop in request.sampling.stop if stop in text]
        return FinishReason.STOP, min(found)[1] if found else renderer().end_of_turn_id

    def _send(
        self,
        request: GenerateRequest,
        sink: ChunkSink,
        ids: list[int],
        reason: FinishReason | None,
        stop: int | str | None = None,
    ) -> None:
        spans = (TokenSpan(3, "", len(ids)),) if ids else ()
        logprobs = [-0.25] * len(ids)
        tops = [likely for token_id in ids for likely in tops_of(token_id, request.top_logprobs)]
        sink.send(
            TokenChunk(
                request.call_id,
                pack_int32(ids),
                pack_float32(logprobs),
                spans,
                reason,
                stop,
                top_ids=pack_int32([token_id for token_id, _ in tops]),
                top_logprobs=pack_float32([logprob for _, logprob in tops]),
            )
        )


def tops_of(token_id: int, num_tops: int) -> list[tuple[int, float]]:
    """What the scripted model says was likeliest where it sampled `token_id`; that is not among it."""
    return [((token_id + 1 + place) % 256, -1.0 - place) for place in range(num_tops)]


def text_of(ids: Any) -> str:
    return "".join(map(renderer().token_text, ids.tolist()))


@dataclass
class World:
    """What a test holds in its hands."""

    run: str
    service: Service
    scheduler: FakeScheduler
    redis: StoreConnection
    model: ScriptedModel
    folder: Path
    nats: ServerProcess
    redis_server: ServerProcess
    stack: AsyncExitStack
    settings: dict[str, Any] = field(default_factory=dict)
    base_url: str = ""
    run_settings: dict[str, Any] = field(default_factory=dict)  # at the top of the experiment file

    def config_file(self, **gateway: Any) -> Path:
        path = self.folder / "experiment.yaml"
        section = {
            "channel": {"keepalive_s": 0.1, "silence_s": 1.0},
            "drain_s": 1.0,
            **self.settings,
            **gateway,
        }
        content = {
            "exp_name": self.run,
            "output_dir": str(self.folder / "runs"),
            **self.run_settings,
            "gateway": section,
        }
        path.write_text(yaml.safe_dump(content))
        return path

    async def start_gateway(self, instance_id: str = "gateway-0", **gateway: Any) -> Service:
        """A gateway in this process."""
        source = str(self.config_file(**gateway))
        experiment = load_experiment(source)
        endpoints = Endpoints(nats_url=self.nats.url, redis_url=self.redis_server.url, host_id="test")
        args = Args(source, instance_id, experiment, run_config(experiment, source), endpoints)
        service = await build(args)
        await self.stack.enter_async_context(serving(service))
        return service

    async def spawn_gateway(self, instance_id: str, port: int) -> asyncio.subprocess.Process:
        """A gateway process of its own, to be killed."""
        environment = {
            **os.environ,
            "TAILRACE_NATS_URL": self.nats.url,
            "TAILRACE_REDIS_URL": self.redis_server.url,
            "TAILRACE_HOST_ID": "test",
            "TAILRACE_METRICS_PORT": "0",
            "TAILRACE_GATEWAY_PORT": str(port),
        }
        log = (self.folder / f"{instance_id}.log").open("w")
        argv = ["-m", "tailrace_gateway", "--config", str(self.config_file())]
        process = await asyncio.create_subprocess_exec(
            sys.executable, *argv, "--instance-id", instance_id, env=environment, stderr=log
        )
        self.stack.push_async_callback(end, process)
        return process

    async def open(
        self,
        episode_id: str = "g0.0",
        *,
        max_episode_tokens: int = 20_000,
        max_new_tokens: int = 5_000,
        timeout_s: float = 60.0,
        sampling: SamplingParams = _SAMPLING,
        seed: int | None = None,
    ) -> SessionOpened:
        """Open a session as agents do."""
        limits = SessionLimits(max_episode_tokens, max_new_tokens, time.time() + timeout_s)
        return await self.service.bus.request(
            subjects.gateway_open(self.run),
            OpenSession(episode_id, limits, sampling, seed),
            SessionOpened,
            timeout_s=10.0,
            idempotent_retries=20,
        )

    async def export(
        self,
        session_id: str = "g0.0",
        rewards: dict[str, float] | None = None,
        style: ExportStyle = ExportStyle.INDIVIDUAL,
        turn_discount: float = 1.0,
    ) -> SessionExport:
        request = ExportSession(session_id, rewards or {}, style, turn_discount)
        subject = subjects.gateway_export(self.run)
        return await self.service.bus.request(subject, request, SessionExport, timeout_s=10.0)

    async def close(self, session_id: str = "g0.0") -> SessionClosed:
        subject = subjects.gateway_close(self.run)
        return await self.service.bus.request(
            subject, CloseSession(session_id), SessionClosed, timeout_s=10.0
        )

    def openai(self, opened: SessionOpened, **settings: Any) -> openai.AsyncOpenAI:
        client = openai.AsyncOpenAI(base_url=opened.base_url, api_key=opened.api_key, **settings)
        self.stack.push_async_callback(client.close)
        return client

    def anthropic(self, opened: SessionOpened, **settings: Any) -> anthropic.AsyncAnthropic:
        url = opened.base_url.removesuffix("/v1")
        client = anthropic.AsyncAnthropic(base_url=url, api_key=opened.api_key, **settings)
        self.stack.push_async_callback(client.close)
        return client

    def http(self, opened: SessionOpened, key: str | None = None) -> httpx2.AsyncClient:
        key = opened.api_key if key is None else key
        headers = {"authorization": f"Bearer {key}"} if key else {}
        client = httpx2.AsyncClient(base_url=opened.base_url, headers=headers, timeout=20.0)
        self.stack.push_async_callback(client.aclose)
        return client


@asynccontextmanager
async def world_of(
    nats: ServerProcess, redis_server: ServerProcess, run: str, folder: Path
) -> AsyncIterator[World]:
    """A run with its model card, a scheduler and an inference server; no gateway yet."""
    async with AsyncExitStack() as stack:
        redis = await connect(redis_server.url)
        stack.push_async_callback(redis.aclose)
        await Blobs(redis, run).put_model_card(model_card())
        service = make_service(nats.url, run, "scheduler")
        scheduler = FakeScheduler(service, run)
        await stack.enter_async_context(serving(service))
        model = ScriptedModel()
        server = ZmqGenerateServer(f"ipc://{folder}/s0.ipc")
        await server.start(model)
        stack.push_async_callback(server.stop)
        scheduler.addresses.append(Address("s0", "", server.endpoint))
        yield World(run, service, scheduler, redis, model, folder, nats, redis_server, stack)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    await eventually(condition, timeout_s)


__all__ = [
    "ADMIN_KEY",
    "ScriptedModel",
    "World",
    "free_port",
    "text_of",
    "tops_of",
    "until",
    "world_of",
]
