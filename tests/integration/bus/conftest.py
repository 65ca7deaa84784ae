"""A connected bus, and one whose run has its streams."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tailrace.bus import Bus, StreamLimits
from tests.conftest import ServerProcess
from tests.integration.runtime.serving import endpoints_of


@pytest.fixture
async def bus(nats_server: ServerProcess, run_name: str) -> AsyncIterator[Bus]:
    connected = await Bus.connect(endpoints_of(nats_server.url), name="test", run=run_name)
    yield connected
    await connected.close()


@pytest.fixture
async def run_bus(bus: Bus) -> Bus:
    """With streams; an unacknowledged message comes again after 1 s."""
    await bus.provision_run(bus.run, StreamLimits(ack_wait_s=1.0))
    return bus
