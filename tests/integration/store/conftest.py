"""Stores of a real Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.store import StoreConnection, TrajectoryBuffer
from tests.world.servers import ServerProcess, make_redis_server


@pytest.fixture
def buffer(redis: StoreConnection, run_name: str) -> TrajectoryBuffer:
    return TrajectoryBuffer(redis, run_name)


@pytest.fixture
def own_redis_server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A Redis that the test may kill."""
    server = make_redis_server(tmp_path)
    server.start()
    yield server
    server.kill()
