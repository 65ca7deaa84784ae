"""The world that workflows live in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.gateway.world import ADMIN_KEY
from tests.integration.workflows.world import World, world_of
from tests.world.servers import ServerProcess


@pytest.fixture
async def world(
    nats_server: ServerProcess,
    redis_server: ServerProcess,
    run_name: str,
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[World]:
    monkeypatch.setenv("TAILRACE_GATEWAY_ADMIN_KEY", ADMIN_KEY)
    async with world_of(nats_server, redis_server, run_name, short_folder) as made:
        yield made
