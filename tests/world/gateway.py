"""A run around real gateways: real NATS, Redis, ZMQ and HTTP, and a scripted model."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai

from tailrace.channel import Address, ZmqGenerateServer
from tailrace.runtime import Service
from tailrace_gateway.__main__ import build
from tailrace_protos import subjects
from tailrace_protos.generation import SamplingParams
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
from tests.world.byte_model import model_card
from tests.world.processes import ServiceProcess
from tests.world.run import RunWorld, run_world
from tests.world.scripted_model import ScriptedModel
from tests.world.servers import ServerProcess

_SAMPLING = SamplingParams()
ADMIN_KEY = "the-admin-key-of-these-tests"


@dataclass(kw_only=True)
class GatewayWorld(RunWorld):
    """A run with a scripted model; opens sessions and makes their clients."""

    model: ScriptedModel
    settings: dict[str, Any] = field(default_factory=dict)  # of every gateway

    def _config(self, gateway: dict[str, Any]) -> Path:
        channel = {"keepalive_s": 0.1, "silence_s": 1.0}
        section = {"channel": channel, "drain_s": 1.0, **self.settings, **gateway}
        return self.experiment_file("gateway", section)

    async def start_gateway(self, instance_id: str = "gateway-0", **gateway: Any) -> Service:
        """Start a gateway in this process."""
        return await self.start_service(build, self._config(gateway), instance_id)

    def spawn_gateway(self, instance_id: str, port: int) -> ServiceProcess:
        """Start a gateway process of its own, to be killed."""
        arguments = ("--instance-id", instance_id)
        return self.spawn_service(
            "gateway", self._config({}), instance_id, *arguments, TAILRACE_GATEWAY_PORT=str(port)
        )

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
            timeout_s=60,
            idempotent_retries=60,
        )

    async def export(
        self,
        session_id: str = "g0.0",
        rewards: dict[str, float] | None = None,
        style: ExportStyle = ExportStyle.INDIVIDUAL,
        turn_discount: float = 1.0,
        api_key: str = "",
    ) -> SessionExport:
        request = ExportSession(session_id, rewards or {}, style, turn_discount, api_key=api_key)
        subject = subjects.gateway_export(self.run)
        return await self.service.bus.request(subject, request, SessionExport, timeout_s=60)

    async def close(self, session_id: str = "g0.0", api_key: str = "") -> SessionClosed:
        subject = subjects.gateway_close(self.run)
        return await self.service.bus.request(
            subject, CloseSession(session_id, api_key), SessionClosed, timeout_s=60
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
        client = httpx2.AsyncClient(base_url=opened.base_url, headers=headers, timeout=60.0)
        self.stack.push_async_callback(client.aclose)
        return client


@asynccontextmanager
async def start_model(world: RunWorld) -> AsyncIterator[ScriptedModel]:
    """A scripted model behind a real inference endpoint, which the scheduler leases."""
    await world.put_card(model_card())
    model = ScriptedModel()
    server = ZmqGenerateServer(f"ipc://{world.folder}/s0.ipc")
    await server.start(model)
    world.scheduler.addresses.append(Address("s0", "", server.endpoint))
    yield model
    await server.stop()


@asynccontextmanager
async def gateway_world(
    nats: ServerProcess, redis_server: ServerProcess, run: str, folder: Path
) -> AsyncIterator[GatewayWorld]:
    """A run with its model card, a scheduler and an inference server; no gateway yet."""
    async with run_world(nats, redis_server, run, folder) as base, start_model(base) as model:
        yield GatewayWorld(**vars(base), model=model)
