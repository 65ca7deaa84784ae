"""Connection to a NATS that is away."""

from __future__ import annotations

import asyncio

import pytest

from tailrace.bus.connection import Connection
from tailrace.config import Endpoints
from tests.world.servers import free_port


async def test_lines_about_the_server_have_no_password(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    endpoints = Endpoints(
        nats_url=f"nats://me:secret@127.0.0.1:{port}", redis_url="redis://here", host_id="h"
    )
    opening = asyncio.create_task(Connection(endpoints, "unit").open())
    shown = ""
    async with asyncio.timeout(60):
        while "waiting for nats" not in shown:
            await asyncio.sleep(0)
            shown += capsys.readouterr().out
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert f"nats://127.0.0.1:{port}" in shown
    assert "secret" not in shown


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://me:secret@host:4222", "nats://host:4222"),
        ("tls://secret@host", "tls://host"),
        ("nats://a:b@one:1,nats://c:d@two:2", "nats://one:1,nats://two:2"),
        ("me:secret@host:4222", "host:4222"),
        ("nats://host:4222", "nats://host:4222"),
    ],
)
def test_a_url_is_shown_without_credentials(url: str, shown: str) -> None:
    assert Endpoints(nats_url=url, redis_url="", host_id="h").shown_nats_url == shown
