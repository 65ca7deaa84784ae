"""Both transports, for every test of the contract."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.conftest import ServerProcess
from tests.contract.channel.harness import Ends


@pytest.fixture(params=["nats", "zmq"])
async def ends(
    request: pytest.FixtureRequest, nats_server: ServerProcess, run_name: str
) -> AsyncIterator[Ends]:
    with tempfile.TemporaryDirectory(prefix="tr") as directory:  # ipc paths must be short
        made = Ends(request.param, nats_server.url, run_name, Path(directory))
        try:
            yield made
        finally:
            await made.close()
