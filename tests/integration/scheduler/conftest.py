"""Fixtures: connections of the fakes, and a maker of runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.store import StoreConnection, connect
from tests.conftest import ServerProcess
from tests.integration.scheduler.fakes import FakeRun

MakeRun = Callable[..., FakeRun]


@pytest.fixture
def endpoints(nats_server: ServerProcess, redis_server: ServerProcess) -> Endpoints:
    return Endpoints(nats_url=nats_server.url, redis_url=redis_server.url, host_id="here")


@pytest.fixture
async def store(endpoints: Endpoints) -> AsyncIterator[StoreConnection]:
    connection = await connect(endpoints.redis_url)
    yield connection
    await connection.aclose()


@pytest.fixture
async def bus(endpoints: Endpoints, run_name: str) -> AsyncIterator[Bus]:
    connected = await Bus.connect(endpoints, name="test", run=run_name)
    yield connected
    await connected.close()


@pytest.fixture
def make_run(
    endpoints: Endpoints, bus: Bus, store: StoreConnection, tmp_path: Path, run_name: str
) -> MakeRun:
    def make(**changes: object) -> FakeRun:
        return FakeRun(endpoints, bus, store, tmp_path, run_name, **changes)

    return make
