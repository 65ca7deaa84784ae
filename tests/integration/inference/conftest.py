"""One run with a real nats-server, Redis and weight_sync per test."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tailrace.bus import Bus
from tailrace.channel import ZmqGenerateClient
from tailrace.config import Endpoints
from tailrace.store import connect
from tailrace.weights import WeightPublisher
from tests.conftest import ServerProcess
from tests.integration.inference.world import SERVER_ID, Processes, World


@pytest.fixture
async def world(
    nats_server: ServerProcess,
    redis_server: ServerProcess,
    run_name: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> AsyncIterator[World]:
    """A run with weight_sync and one inference server; a test's marker `settings` configures it."""
    endpoints = Endpoints(nats_url=nats_server.url, redis_url=redis_server.url, host_id="this-host")
    settings = getattr(request, "param", {})
    processes = Processes(endpoints, run_name, tmp_path, settings)
    processes.start("weight_sync", "weight_sync")
    processes.start("inference", SERVER_ID)
    bus = await Bus.connect(endpoints, name="test", run=run_name)
    await bus.provision_run(run_name)
    redis = await connect(endpoints.redis_url)
    publisher = WeightPublisher(bus, run_name, endpoints.host_id)
    client = ZmqGenerateClient()
    await client.start()
    yield World(bus, redis, processes, publisher, client)
    await client.close()
    await publisher.close()
    await redis.aclose()
    await bus.close()
    processes.stop()
