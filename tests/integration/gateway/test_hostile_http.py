"""Requests of strangers without a key: each is refused, costs a bounded memory, and slows nobody."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import pytest

from tailrace_gateway.adapters.server import BoundedProtocol
from tests.world.gateway import GatewayWorld

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
MB = 1 << 20


def header_without_an_end() -> AsyncIterator[bytes]:
    return endless(HEAD + b"X-A: ", b"a" * 65536)


def headers_without_an_end() -> AsyncIterator[bytes]:
    return endless(HEAD, b"X-A: " + b"a" * 4000 + b"\r\n")


def a_path_without_an_end() -> AsyncIterator[bytes]:
    return endless(b"GET /", b"a" * 65536)


def a_method_without_an_end() -> AsyncIterator[bytes]:
    return endless(b"GET", b"T" * 65536)


async def endless(first: bytes, more: bytes, total: int = 64 * MB) -> AsyncIterator[bytes]:
    yield first
    for _ in range(total // len(more)):
        yield more


async def once(data: bytes) -> AsyncIterator[bytes]:
    yield data


KEY = b"Authorization: Bearer tr-x\r\n"
REQUESTS: dict[str, Callable[[], AsyncIterator[bytes]]] = {
    "a header without an end": header_without_an_end,
    "headers without an end": headers_without_an_end,
    "a path without an end": a_path_without_an_end,
    "a method without an end": a_method_without_an_end,
    "a body longer than it says": lambda: once(HEAD + b"Content-Length: 1\r\n\r\n" + b"x" * 4 * MB),
    "two lengths": lambda: once(HEAD + b"Content-Length: 1\r\nContent-Length: 9\r\n\r\nx"),
    "a length and chunks": lambda: once(
        HEAD
        + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        + b"GET /health HTTP/1.1\r\n\r\n"
    ),
    "a negative length": lambda: once(HEAD + b"Content-Length: -1\r\n\r\n"),
    "a length of many digits": lambda: once(HEAD + b"Content-Length: " + b"9" * 400 + b"\r\n\r\n"),
    "a chunk of a great size": lambda: once(
        HEAD + KEY + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\nx"
    ),
    "a compressed body": lambda: once(
        HEAD + KEY + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\n\x1f\x8b\x08"
    ),
    "line feeds in a header": lambda: once(HEAD + b"X-A: b\n\nGET /health HTTP/1.1\r\n\r\n"),
    "no text": lambda: once(bytes(range(256)) * 40),
    "another protocol": lambda: once(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(90)),
    "a websocket": lambda: once(
        b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    ),
    "a path that climbs": lambda: once(
        b"GET /v1/sessions/..%2f..%2f..%2fetc%2fpasswd HTTP/1.1\r\nHost: x\r\n" + KEY + b"\r\n"
    ),
    "a thousand requests in one": lambda: once(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n" * 1000),
}


async def test_a_connection_that_sends_no_request_is_closed(
    world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_timeout_s", 0.1)
    url = urlsplit((await world.open()).base_url)
    for sent in (b"", HEAD):
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(sent)
        async with asyncio.timeout(60):
            assert await reader.read() == b""
        writer.close()


async def test_a_client_that_keeps_its_connection_may_wait_between_requests(
    world: GatewayWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "head_timeout_s", 0.1)
    opened = await world.open()
    client = world.openai(opened)
    assert (await client.models.list()).data
    await asyncio.sleep(0.3)  # longer than a head may take
    assert (await client.models.list()).data


async def answer_to(host: str, port: int, request: AsyncIterator[bytes]) -> bytes:
    """What the gateway says until it closes, or for three seconds."""
    reader, writer = await asyncio.open_connection(host, port)

    async def send() -> None:
        async for part in request:
            writer.write(part)
            await writer.drain()

    sending = asyncio.create_task(send())
    said = b""
    try:
        async with asyncio.timeout(3):
            while part := await reader.read(65536):
                said += part
    except (TimeoutError, ConnectionError):
        pass
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.close()
    return said


@pytest.mark.parametrize("name", REQUESTS)
async def test_a_strangers_request_costs_little_and_slows_nobody(
    name: str, world: GatewayWorld
) -> None:
    opened = await world.open()
    url = urlsplit(opened.base_url)
    assert url.hostname is not None
    assert url.port is not None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    asking = asyncio.create_task(answer_to(url.hostname, url.port, REQUESTS[name]()))
    healthy = await world.http(opened, "").get("../health")
    assert healthy.status_code == 200
    said = await asking
    assert b"200 OK" not in said
    assert b"root:" not in said
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 40 * 1024  # KiB; the endless ones send 64 MiB
    healthy = await world.http(opened, "").get("../health")
    assert healthy.status_code == 200
