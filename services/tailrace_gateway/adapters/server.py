"""The HTTP server: uvicorn in this process's own event loop, on a port that replicas share.

`SO_REUSEPORT` lets the kernel spread connections over the replicas of one host; when one dies, new
connections go to the others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from tailrace.config import ConfigError
from tailrace_gateway.adapters.one_write import OneWriteProtocol

_BACKLOG = 4096


class _QuietServer(uvicorn.Server):
    """uvicorn that leaves signals to the service."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing: the service tells when to end."""
        yield


class HttpServer:
    """Listens from `start` to `stop`."""

    def __init__(self, app: ASGIApp, listener: socket.socket, keep_alive_s: int) -> None:
        config = uvicorn.Config(
            app,
            http=OneWriteProtocol,
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
        """Accept no more connections; end when those in flight are answered, or now."""
        self._server.should_exit = True
        self._server.force_exit = at_once


def bind(host: str, port: int) -> socket.socket:
    """A socket on a port that other replicas may share; `ConfigError` when somebody else has it."""
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


async def ended(serving: asyncio.Task[object], hurry_s: float, server: HttpServer) -> None:
    """Wait for a stopped server to end; those who are still connected after `hurry_s` are cut off."""
    _, late = await asyncio.wait({serving}, timeout=hurry_s)
    if late:
        server.stop(at_once=True)
        await asyncio.wait({serving}, timeout=hurry_s)
