"""Both transports, for every test of the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.contract.channel.harness import Ends
from tests.world.servers import ServerProcess


@pytest.fixture(params=["nats", "zmq"])
async def ends(
    request: pytest.FixtureRequest, nats_server: ServerProcess, run_name: str, short_folder: Path
) -> AsyncIterator[Ends]:
    made = Ends(request.param, nats_server.url, run_name, short_folder)
    yield made
    await made.close()
