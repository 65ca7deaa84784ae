"""Worlds with and without a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.world.gateway import ADMIN_KEY, GatewayWorld, gateway_world
from tests.world.servers import ServerProcess


@pytest.fixture
async def empty_world(
    nats_server: ServerProcess,
    redis_server: ServerProcess,
    run_name: str,
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[GatewayWorld]:
    monkeypatch.setenv("TAILRACE_GATEWAY_ADMIN_KEY", ADMIN_KEY)
    async with gateway_world(nats_server, redis_server, run_name, short_folder) as made:
        yield made


@pytest.fixture
async def world(empty_world: GatewayWorld) -> GatewayWorld:
    await empty_world.start_gateway()
    return empty_world
