"""A bus, a client with short deadlines, and workers that end with the test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from tailrace.bus import Bus
from tailrace.sdk.tool import AnyTool
from tailrace.tools import ToolClient, ToolDeadlines, ToolWorker
from tests.world.servers import ServerProcess
from tests.world.serving import endpoints_of

SHORT_DEADLINES = ToolDeadlines(
    probe_s=0.1, absent_after_s=1.5, silent_after_s=4.0, lease_s=3.0, accept_s=3.0, nobody_s=1.0
)

Serve = Callable[..., Awaitable[ToolWorker]]


@pytest.fixture
async def client(bus: Bus) -> AsyncIterator[ToolClient]:
    made = ToolClient(bus, bus.run, deadlines=SHORT_DEADLINES)
    yield made
    await made.close()


@pytest.fixture
async def serve(nats_server: ServerProcess, run_name: str) -> AsyncIterator[Serve]:
    """Start a worker with a connection of its own, for this test's run only unless told otherwise."""
    workers: list[tuple[ToolWorker, Bus]] = []

    async def start(*tools: AnyTool, **options: Any) -> ToolWorker:
        bus = await Bus.connect(endpoints_of(nats_server.url), name="worker")
        worker = ToolWorker(tools, bus, **{"run": run_name, **options})
        await worker.start()
        workers.append((worker, bus))
        return worker

    yield start
    for worker, bus in workers:
        await worker.close()
        await bus.close()
