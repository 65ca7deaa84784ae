"""`flush`, and the end of a subscription, come after what the client had still to write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from nats.aio.client import Client
from nats.aio.msg import Msg

from tailrace.bus import flush
from tailrace.bus.connection import Connection
from tests.world.serving import endpoints_of

INFO = b'INFO {"server_id":"s","version":"2.10.0","max_payload":1048576}\r\n'


@asynccontextmanager
async def server() -> AsyncIterator[tuple[str, list[str]]]:
    """URL of a server that answers pings, and the commands that it hears."""
    heard: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        while line := (await reader.readline()).decode().split(" ")[0].strip():
            heard.append(line)
            if line == "PING":
                writer.write(b"PONG\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield f"nats://127.0.0.1:{listening.sockets[0].getsockname()[1]}", heard


def before_the_last_ping(heard: list[str]) -> list[str]:
    return heard[: len(heard) - heard[::-1].index("PING")]


async def test_the_last_ping_of_a_flush_follows_the_subscription() -> None:
    async with server() as (url, heard):
        client = Client()
        await client.connect(url)
        heard.clear()
        await client.subscribe("subject")
        await flush(client)
        assert "SUB" in before_the_last_ping(heard), heard
        await client.close()


async def test_a_subscription_ends_once_the_server_knows_that_it_has_ended() -> None:
    """Else a message that the server sends meanwhile is lost: an episode, or a request."""

    async def receive(_: Msg) -> None: ...

    async with server() as (url, heard):
        connection = Connection(endpoints_of(url), "unit")
        await connection.open()
        subscription = await connection.subscribe("subject", receive)
        await flush(connection.client)
        heard.clear()
        await connection.drain(subscription)
        assert "UNSUB" in before_the_last_ping(heard), heard
        await connection.close()
