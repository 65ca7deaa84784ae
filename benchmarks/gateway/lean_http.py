"""An HTTP client that does next to nothing, so that what is measured is the server.

One connection, one request at a time; requests are bytes that were made beforehand.
"""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import httptools


def post(url: str, key: str, content: dict[str, object]) -> bytes:
    """A request as it goes over the wire."""
    parts = urlsplit(url)
    body = json.dumps(content).encode()
    head = (
        f"POST {parts.path} HTTP/1.1\r\n"
        f"host: {parts.netloc}\r\n"
        f"authorization: Bearer {key}\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class LeanHttp(asyncio.Protocol):
    """A connection that is kept; opened by `connect`."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[int] = self._loop.create_future()
        self._body = bytearray()
        self._parser = httptools.HttpResponseParser(self)

    @classmethod
    async def connect(cls, url: str) -> LeanHttp:
        """A connection to the server of a URL."""
        parts = urlsplit(url)
        loop = asyncio.get_running_loop()
        _, protocol = await loop.create_connection(cls, parts.hostname, parts.port)
        return protocol

    async def ask(self, request: bytes) -> None:
        """Send and wait for the answer; anything but 200 is an error of the benchmark."""
        assert self._transport is not None
        self._answer = self._loop.create_future()
        self._body.clear()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        status = await self._answer
        assert status == 200, bytes(self._body)

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """See `asyncio.Protocol`."""
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        if not self._answer.done():
            self._answer.set_exception(error or ConnectionResetError("the server hung up"))

    def on_body(self, data: bytes) -> None:
        """See `httptools`."""
        self._body += data

    def on_message_complete(self) -> None:
        """See `httptools`."""
        if not self._answer.done():
            self._answer.set_result(self._parser.get_status_code())
