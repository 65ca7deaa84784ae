"""`flush` comes after what the client had still to write."""

from __future__ import annotations

import asyncio

from nats.aio.client import Client

from tailrace.bus import flush

INFO = b'INFO {"server_id":"s","version":"2.10.0","max_payload":1048576}\r\n'


async def test_the_last_ping_of_a_flush_follows_the_subscription() -> None:
    heard: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(INFO)
        while line := (await reader.readline()).decode().split(" ")[0].strip():
            heard.append(line)
            if line == "PING":
                writer.write(b"PONG\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        client = Client()
        await client.connect(f"nats://127.0.0.1:{port}")
        heard.clear()
        await client.subscribe("subject")
        await flush(client)
        assert "SUB" in heard[: len(heard) - heard[::-1].index("PING")], heard
        await client.close()
