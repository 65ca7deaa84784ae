"""The world that workflows live in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.world.gateway import ADMIN_KEY
from tests.world.servers import ServerProcess
from tests.world.workflows import WorkflowWorld, workflow_world


@pytest.fixture
async def world(
    nats_server: ServerProcess,
    redis_server: ServerProcess,
    run_name: str,
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> AsyncIterator[WorkflowWorld]:
    """A module with `REAL_REWARDS` starts the reward service itself."""
    real = getattr(request.module, "REAL_REWARDS", False)
    monkeypatch.setenv("TAILRACE_GATEWAY_ADMIN_KEY", ADMIN_KEY)
    async with workflow_world(
        nats_server, redis_server, run_name, short_folder, real_rewards=real
    ) as made:
        yield made
