"""HTTP server: uvicorn in the event loop of this process, on a port that replicas share.

`SO_REUSEPORT` lets the kernel spread connections over the replicas of one host; after the death of a
replica, new connections go to the others.

Write coalescing: uvicorn writes the head and the body of a response separately, and uvloop passes each
write to the kernel at once. The transport below joins them into one system call, one segment and one
wake-up of the client. It does not delay a body until the next loop iteration, because the remaining
work of its request would delay it further.
"""

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tailrace.config import ConfigError

_BACKLOG = 4096
_HEAD = b"HTTP/"
_MAX_HEAD_BYTES = 256 * 1024
_HEAD_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
)


class _QuietServer(uvicorn.Server):
    """uvicorn server that leaves signals to the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing: the service decides when to stop."""
        yield


class HttpServer:
    """HTTP server that listens until `stop`."""

    def __init__(self, app: ASGIApp, listener: socket.socket, keep_alive_s: int) -> None:
        config = uvicorn.Config(
            app,
            http=BoundedProtocol,
            ws="none",
            lifespan="off",
            loop="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=keep_alive_s,
            backlog=_BACKLOG,
        )
        self._server = _QuietServer(config)
        self._listener = listener

    async def serve(self) -> None:
        """Serve until `stop`."""
        await self._server.serve(sockets=[self._listener])

    def stop(self, *, at_once: bool = False) -> None:
        """Accept no more connections; finish the requests in flight first, or stop at once."""
        self._server.should_exit = True
        self._server.force_exit = at_once

    async def wait_stopped(self, serving: asyncio.Task[object], grace_s: float) -> None:
        """Wait for a stopped server to end; close the connections that remain after `grace_s`."""
        _, late = await asyncio.wait({serving}, timeout=grace_s)
        if late:
            self.stop(at_once=True)
            await asyncio.wait({serving}, timeout=grace_s)


def bind(host: str, port: int) -> socket.socket:
    """Open a socket on a port that replicas share; raise `ConfigError` if another program uses the
    port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise ConfigError(
            f"gateway.port: cannot listen on {host}:{port} ({reason}): free the port, or choose "
            "another; 0 finds a free one"
        ) from error
    listener.setblocking(False)
    return listener


def origin_of(listener: socket.socket, host: str) -> str:
    """Return the origin of URLs to a listener that was bound to `host`."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


class BoundedProtocol(HttpToolsProtocol):
    """uvicorn's protocol over a transport that coalesces writes, with bounds for a request's head.

    The parser keeps a path or header until its end, so that a stranger could fill the memory with one;
    and uvicorn waits for a first request without an end.
    """

    head_timeout_s = 30.0
    _num_begun = 0
    _head_bytes = 0  # of the head that is being read, without its first piece
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See `asyncio.Protocol`."""
        super().connection_made(_CoalescingTransport(transport, self.loop))
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """See `asyncio.Protocol`."""
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Refuse a head that is too long."""
        num_begun = self._num_begun
        super().data_received(data)
        if self._waiting is not None and num_begun == self._num_begun:
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._end_wait()
                self.transport.write(_HEAD_TOO_LONG)
                self.transport.close()

    def on_message_begin(self) -> None:
        """See httptools."""
        self._num_begun += 1
        self._head_bytes = 0
        super().on_message_begin()
        if self._waiting is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        """See httptools."""
        self._end_wait()
        super().on_headers_complete()

    def _wait_for_head(self) -> None:
        self._waiting = self.loop.call_later(self.head_timeout_s, self.transport.close)

    def _end_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


class _CoalescingTransport(asyncio.Transport):
    """Transport that delays a write by at most one loop iteration, and flushes before a close."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._waiting: list[bytes | bytearray | memoryview[Any]] = []

    def write(self, data: "bytes | bytearray | memoryview[Any]") -> None:
        """Flush at once if the buffer holds a response head; else flush once per loop iteration."""
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
        """Flush the buffer, then close."""
        self._flush()
        self._transport.close()

    def abort(self) -> None:
        """Close at once and drop the buffer."""
        self._waiting.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        """True if the connection is closed or closing."""
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
