"""The world that agents live in."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import ServerProcess
from tests.integration.agents.world import World, world_of


@pytest.fixture
async def world(
    nats_server: ServerProcess, redis_server: ServerProcess, run_name: str
) -> AsyncIterator[World]:
    with tempfile.TemporaryDirectory() as folder:  # short: a socket's path has at most 107 characters
        async with world_of(nats_server, redis_server, run_name, Path(folder)) as made:
            yield made
