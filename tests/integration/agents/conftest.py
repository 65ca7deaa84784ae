"""The world that agents live in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.world.agents import AgentsWorld, agents_world
from tests.world.servers import ServerProcess


@pytest.fixture
async def world(
    nats_server: ServerProcess, redis_server: ServerProcess, run_name: str, short_folder: Path
) -> AsyncIterator[AgentsWorld]:
    async with agents_world(nats_server, redis_server, run_name, short_folder) as made:
        yield made
