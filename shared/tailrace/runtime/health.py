"""Metrics port of a service: `/livez`, `/readyz` and `/metrics`.

The service's own event loop serves it, so a blocked loop does not answer `/livez`.
`TAILRACE_METRICS_PORT` sets the port (0 or unset: a free port, which is logged) and
`TAILRACE_METRICS_HOST` the address (default 127.0.0.1; a pod needs 0.0.0.0).
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, disable_created_metrics, generate_latest

from tailrace import metrics
from tailrace.config import ConfigError
from tailrace_protos.base import encode_json

REQUEST_TIMEOUT_S = 5.0
_TIMER_S = 0.25
MAX_REQUEST_LINES = 100


class HealthServer:
    """Small HTTP server. `not_ready()` returns the reason, empty when the service is ready."""

    def __init__(self, not_ready: Callable[[], str], env: Mapping[str, str] = os.environ) -> None:
        self._not_ready = not_ready
        self._host = env.get("TAILRACE_METRICS_HOST", "127.0.0.1")
        self._wanted_port = _port(env.get("TAILRACE_METRICS_PORT", "0"))
        self._server: asyncio.Server | None = None
        disable_created_metrics()  # type: ignore[no-untyped-call]  # series that nobody reads
        self.port = 0

    async def start(self) -> None:
        """Listens; `ConfigError` when the port is in use."""
        try:
            self._server = await asyncio.start_server(
                self._serve, self._host, self._wanted_port, limit=8192
            )
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(
                f"cannot listen on {self._host}:{self._wanted_port} for metrics ({reason}): "
                "free the port, or set TAILRACE_METRICS_PORT to another one (0: any free port)"
            ) from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stops listening."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                target = await _request_target(reader)
                status, kind, body = self._answer(target)
                head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                writer.write(head.encode() + b"Connection: close\r\n\r\n" + body)
                await writer.drain()
        except (TimeoutError, ConnectionError, ValueError):
            pass  # the client does not speak HTTP, or has disconnected
        finally:
            writer.close()

    def _answer(self, target: str) -> tuple[str, str, bytes]:
        path = target.split("?")[0]
        if path == "/metrics":
            return "200 OK", CONTENT_TYPE_LATEST, generate_latest()
        if path == "/livez":
            return "200 OK", "text/plain", b"ok\n"
        if path == "/readyz":
            reason = self._not_ready()
            status = "503 Service Unavailable" if reason else "200 OK"
            return status, "text/plain", f"{reason or 'ok'}\n".encode()
        return "404 Not Found", "text/plain", b"try /livez, /readyz or /metrics\n"


@contextmanager
def announced(port: int, run: str, service: str, instance_id: str) -> Iterator[None]:
    """Keeps a file for Prometheus's `file_sd_configs` with a port that the system chose.

    It is `metrics/<instance>-<pid>.json` in `TAILRACE_STATE_DIR`; without that, or for a chosen port,
    there is none.
    """
    folder = os.environ.get("TAILRACE_STATE_DIR", "")
    if not folder or os.environ.get("TAILRACE_METRICS_PORT", "0") != "0":
        yield
        return
    path = Path(folder) / "metrics" / f"{instance_id or service}-{os.getpid()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    labels = {"run": run, "service": service, "pod": instance_id}
    path.write_bytes(encode_json([{"targets": [f"127.0.0.1:{port}"], "labels": labels}]))
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


async def watch_loop_delay() -> None:
    """Measures for ever how late the event loop runs a timer."""
    loop = asyncio.get_running_loop()
    worst_s = 0.0
    while True:
        due_s = loop.time() + _TIMER_S
        await asyncio.sleep(_TIMER_S)
        delay_s = max(0.0, loop.time() - due_s)
        worst_s = max(worst_s, delay_s)
        metrics.LOOP_DELAY_SECONDS.observe(delay_s)
        metrics.WORST_LOOP_DELAY_SECONDS.set(worst_s)


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise ConfigError(f"TAILRACE_METRICS_PORT={text!r} is no port: use 0 (any free one) to 65535")
    return int(text)


async def _request_target(reader: asyncio.StreamReader) -> str:
    """Reads the path of a GET request; `ValueError` for any other request."""
    method, target, _ = (await reader.readline()).decode("latin-1").split(" ", 2)
    if method != "GET":
        raise ValueError(f"{method} is not served")
    for _ in range(MAX_REQUEST_LINES):
        if await reader.readline() in (b"\r\n", b""):
            return target
    raise ValueError("too many header lines")
