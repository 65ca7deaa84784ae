"""HTTP answers in one piece: the head goes out with the body, later pieces with all of their turn.

uvicorn writes the head of an answer and its body apart, and uvloop hands each to the kernel at once.
Together they cost one system call, one segment and one wake-up of the client, in place of two each.
A body does not wait for the loop's next turn, as what is left to do for its request would delay it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_HEAD = b"HTTP/"


class OneWriteProtocol(HttpToolsProtocol):
    """uvicorn's protocol on a transport that gathers writes."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(_Gathering(transport, self.loop))


class _Gathering(asyncio.Transport):
    """Passes everything on; writes at most a turn of the loop later, and always before a close."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes | bytearray | memoryview[Any]] = []

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        """Send this with what waits, if that is a head; else with all that is written in this turn."""
        has_head = len(self._waiting) == 1 and bytes(self._waiting[0][:5]) == _HEAD
        if not self._waiting:
            self._loop.call_soon(self._flush)
        self._waiting.append(data)
        if has_head:
            self._flush()

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if waiting and not self._transport.is_closing():
            self._transport.write(b"".join(waiting) if len(waiting) > 1 else waiting[0])

    def close(self) -> None:
        """Send what waits, then close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once."""
        self._waiting.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        """Whether the connection is closed or about to be."""
        return self._transport.is_closing()

    def pause_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        """See `asyncio.ReadTransport`."""
        self._transport.resume_reading()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """See `asyncio.BaseTransport`."""
        return self._transport.get_extra_info(name, default)
