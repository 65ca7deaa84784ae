"""Stores of a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tailrace.store import Outbox, StoreConnection, TrajectoryBuffer, connect
from tests.conftest import ServerProcess, make_redis_server


@pytest.fixture
async def redis(redis_server: ServerProcess) -> AsyncIterator[StoreConnection]:
    connection = await connect(redis_server.url)
    yield connection
    await connection.aclose()


@pytest.fixture
def buffer(redis: StoreConnection, run_name: str) -> TrajectoryBuffer:
    return TrajectoryBuffer(redis, run_name)


@pytest.fixture
def outbox(redis: StoreConnection, run_name: str) -> Outbox:
    return Outbox(redis, run_name)


@pytest.fixture
def own_redis_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A Redis that the test may kill."""
    server = make_redis_server(tmp_path)
    server.start()
    yield server
    server.kill()
