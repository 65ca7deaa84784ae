"""nats-server, Redis, an engine and a gateway as processes of one benchmark run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from benchmarks.gateway.model import model_card
from tailrace.bus import Bus, CallFailedError, CallTimeoutError, NoResponderError
from tailrace.channel import Address
from tailrace.config import Endpoints
from tailrace.store import Blobs, connect
from tailrace_cli.cluster.servers import choose_port, nats_server_binary, redis_server_binary
from tailrace_cli.config import ClusterConfig
from tailrace_protos import subjects
from tailrace_protos.session import OpenSession, SessionLimits, SessionOpened
from tailrace_protos.weights import ModelCard

RUN = "bench"


@dataclass
class World:
    """Servers that the benchmark calls."""

    bus: Bus
    engine: Address
    engine_process: psutil.Process
    gateway: psutil.Process
    hello: psutil.Process
    hello_url: str
    metrics_url: str  # of the gateway
    num_opened: int = 0

    async def open(self, max_new_tokens: int = 1 << 20) -> SessionOpened:
        """A session of its own."""
        self.num_opened += 1
        limits = SessionLimits(1 << 20, max_new_tokens, time.time() + 3600.0)
        request = OpenSession(f"episode.{self.num_opened}", limits)
        subject = subjects.gateway_open(RUN)
        return await self.bus.request(subject, request, SessionOpened, timeout_s=60.0)


def _servers(folder: Path, nats_port: int, redis_port: int) -> list[list[str]]:
    redis = redis_server_binary(ClusterConfig())
    redis_where = ["--port", str(redis_port), "--bind", "127.0.0.1", "--dir", str(folder)]
    durable = ["--appendonly", "yes", "--appendfsync", "everysec", "--save", ""]
    return [
        [nats_server_binary(ClusterConfig()), "-a", "127.0.0.1", "-p", str(nats_port)],
        [redis, *redis_where, *durable],
    ]


@asynccontextmanager
async def world_of(folder: Path, card: ModelCard | None = None) -> AsyncIterator[World]:
    """Everything up, for a model of bytes or of this card; all processes end with the block."""
    *ports, hello_port, metrics_port = (choose_port(0, "benchmark") for _ in range(4))
    endpoints = Endpoints(
        nats_url=f"nats://127.0.0.1:{ports[0]}",
        redis_url=f"redis://127.0.0.1:{ports[1]}/0",
        host_id="bench",
    )
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "TAILRACE_NATS_URL": endpoints.nats_url,
        "TAILRACE_REDIS_URL": endpoints.redis_url,
        "TAILRACE_GATEWAY_ADMIN_KEY": "benchmark-admin-key",
    }
    config = folder / "experiment.yaml"
    config.write_text(yaml.safe_dump({"exp_name": RUN, "output_dir": str(folder)}))
    engine = f"ipc://{folder}/engine.ipc"
    async with AsyncExitStack() as stack:

        def start(*argv: str, **more: str) -> psutil.Process:
            log = stack.enter_context((folder / "log").open("ab"))
            process = subprocess.Popen(argv, env=environment | more, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
            return psutil.Process(process.pid)

        for argv in _servers(folder, *ports):
            start(*argv)
        redis = await connect(endpoints.redis_url)
        stack.push_async_callback(redis.aclose)
        await Blobs(redis, RUN).put_model_card(card or model_card())
        engine_process = start(sys.executable, "-m", "benchmarks.gateway.engine", RUN, engine)
        hello = start(sys.executable, "-m", "benchmarks.gateway.hello", str(hello_port))
        served = (sys.executable, "-m", "tailrace_gateway", "--config", str(config))
        gateway = start(*served, TAILRACE_METRICS_PORT=str(metrics_port))
        bus = Bus(endpoints, name="bench", run=RUN)
        await bus.start()
        stack.push_async_callback(bus.close)
        address, hello_url = Address("s0", "", engine), f"http://127.0.0.1:{hello_port}/v1"
        metrics_url = f"http://127.0.0.1:{metrics_port}/metrics"
        world = World(bus, address, engine_process, gateway, hello, hello_url, metrics_url)
        await _until_open(world)
        yield world


async def _until_open(world: World) -> None:
    async with asyncio.timeout(120.0):
        while True:
            try:
                await world.open()
            except (CallFailedError, CallTimeoutError, NoResponderError):
                await asyncio.sleep(0.2)
            else:
                return
