"""The world that workflows live in."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import ServerProcess
from tests.integration.gateway.world import ADMIN_KEY
from tests.integration.workflows.world import World, world_of


@pytest.fixture
async def world(
    nats_server: ServerProcess,
    redis_server: ServerProcess,
    run_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[World]:
    monkeypatch.setenv("TAILRACE_GATEWAY_ADMIN_KEY", ADMIN_KEY)
    with tempfile.TemporaryDirectory() as folder:  # short: a socket's path has at most 107 characters
        async with world_of(nats_server, redis_server, run_name, Path(folder)) as made:
            yield made
