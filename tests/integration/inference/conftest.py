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
from tailrace_weight_sync.__main__ import build as build_weight_sync
from tests.integration.inference.world import Services, World
from tests.world.servers import ServerProcess


@pytest.fixture
async def world(
    nats_server: ServerProcess,
    redis_server: ServerProcess,
    run_name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> AsyncIterator[World]:
    """A run with weight_sync; tests start the inference server with their settings."""
    monkeypatch.setenv("TAILRACE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("TAILRACE_METRICS_PORT", "0")
    endpoints = Endpoints(nats_url=nats_server.url, redis_url=redis_server.url, host_id="this-host")
    services = Services(endpoints, run_name, tmp_path, getattr(request, "param", {}))
    bus = await Bus.connect(endpoints, name="test", run=run_name)
    await bus.provision_run(run_name)
    services.serve("weight_sync", build_weight_sync, "weight_sync")
    redis = await connect(endpoints.redis_url)
    publisher = WeightPublisher(bus, run_name, endpoints.host_id)
    client = ZmqGenerateClient()
    await client.start()
    yield World(bus, redis, services, publisher, client)
    await client.close()
    await publisher.close()
    await services.stop()
    await redis.aclose()
    await bus.close()
