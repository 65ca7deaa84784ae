"""The world that agents live in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.agents.world import World, world_of
from tests.world.servers import ServerProcess


@pytest.fixture
async def world(
    nats_server: ServerProcess, redis_server: ServerProcess, run_name: str, short_folder: Path
) -> AsyncIterator[World]:
    async with world_of(nats_server, redis_server, run_name, short_folder) as made:
        yield made
