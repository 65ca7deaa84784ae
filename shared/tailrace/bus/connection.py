"""The one connection of a process to NATS: credentials, reconnection, limits, replies.

Invariants: it reconnects for ever; while disconnected publishers wait instead of filling a buffer;
no message larger than the server's limit is ever handed to the client (the server would close the
connection); whatever a full subscription drops is counted and logged as an error. Only a refusal by
the server (wrong password, protocol error) closes it for good, and then `on_closed` is told why.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tailrace import metrics
from tailrace.bus.errors import BusClosedError, OversizedMessageError
from tailrace.config import ConfigError, Endpoints
from tailrace.log import get_logger

log = get_logger(__name__)

# nats-py drops what exceeds these, so they are far beyond any mailbox; a drop is an error.
PENDING_MESSAGES = 1 << 20
PENDING_BYTES = 512 << 20
WRITE_BUFFER_BYTES = 8 << 20
HEADER_ALLOWANCE_BYTES = 4096
RECONNECT_WAIT_S = 0.2
PING_INTERVAL_S = 5
LOG_DOWN_EVERY_S = 10.0

Headers = dict[str, str]


class Connection:
    """A NATS client that waits out the server's absence."""

    def __init__(self, endpoints: Endpoints, name: str) -> None:
        self.client = Client()
        self.on_closed: Callable[[str], None] = lambda _reason: None
        self.on_lost: list[Callable[[], None]] = []
        self.on_restored: list[Callable[[], None]] = []
        self._endpoints = endpoints
        self._name = name
        self._connected = asyncio.Event()
        self._refused = asyncio.Event()
        self._closing = False
        self._closed_reason = ""
        self._logged_down_s = -LOG_DOWN_EVERY_S

    @property
    def is_connected(self) -> bool:
        """Whether the server is there at this moment."""
        return self._connected.is_set()

    async def open(self) -> None:
        """Return once connected, however long that takes; `ConfigError` when refused."""
        user = self._endpoints.nats_user
        connecting = asyncio.create_task(
            self.client.connect(
                self._endpoints.nats_url,
                name=self._name,
                user=user or None,
                password=self._endpoints.nats_password or None,
                inbox_prefix=f"_INBOX.{user}" if user else "_INBOX",
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
                ping_interval=PING_INTERVAL_S,
                pending_size=WRITE_BUFFER_BYTES,
                error_cb=self._on_error,
                disconnected_cb=self._on_disconnected,
                reconnected_cb=self._on_reconnected,
                closed_cb=self._on_client_closed,
            )
        )
        refused = asyncio.create_task(self._refused.wait())
        try:
            await asyncio.wait({connecting, refused}, return_when=asyncio.FIRST_COMPLETED)
            if not connecting.done():
                raise ConfigError(
                    f"NATS at {self._endpoints.nats_url} refuses user {user!r}: "
                    "check TAILRACE_NATS_USER and TAILRACE_NATS_PASSWORD"
                )
            await connecting
        finally:
            connecting.cancel()
            refused.cancel()
        self._set_connected()

    async def close(self) -> None:
        """Send what is buffered, then close."""
        self._closing = True
        if not self.client.is_closed:
            await self.client.close()
        self._closed_reason = self._closed_reason or "by this process"
        self._connected.set()

    async def wait_connected(self) -> None:
        """Return once the server is there; raises `BusClosedError` if it will not be again."""
        await self._connected.wait()
        if self._closed_reason:
            raise BusClosedError(self._closed_reason)

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Headers | None = None
    ) -> None:
        """Hand a message to the server, waiting for its return if it is away."""
        self.check_size(subject, payload, headers)
        while True:
            if not self._connected.is_set() or self._closed_reason:
                await self.wait_connected()
            try:
                await self.client.publish(subject, payload, reply=reply, headers=headers)
            except nats.errors.OutboundBufferLimitError:
                await asyncio.sleep(RECONNECT_WAIT_S)
            except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as error:
                raise BusClosedError(self._closed_reason or str(error)) from error
            else:
                return

    async def subscribe(
        self, subject: str, receive: Callable[[Msg], Any], *, queue: str = ""
    ) -> Subscription:
        """Subscribe with limits far beyond any mailbox; survives reconnections."""
        await self.wait_connected()
        return await self.client.subscribe(
            subject,
            queue=queue,
            cb=receive,
            pending_msgs_limit=PENDING_MESSAGES,
            pending_bytes_limit=PENDING_BYTES,
        )

    async def drain(self, subscription: Subscription) -> None:
        """Hear nothing new; return when what was heard has been taken. Nothing to do while away."""
        if self._connected.is_set() and not self.client.is_closed:
            draining: Awaitable[None] = subscription.drain()  # type: ignore[no-untyped-call]
            await draining

    def check_size(self, subject: str, payload: bytes, headers: Headers | None) -> None:
        """Raise `OversizedMessageError` for what the server would close the connection for."""
        limit = self.client.max_payload
        if len(payload) <= limit - HEADER_ALLOWANCE_BYTES:
            return
        num_bytes = len(payload)
        if headers:
            lines = sum(len(key.encode()) + len(value.encode()) + 4 for key, value in headers.items())
            num_bytes += len("NATS/1.0\r\n") + lines + len("\r\n")
        if num_bytes > limit:
            raise OversizedMessageError(subject, num_bytes, limit)

    def _set_connected(self) -> None:
        self._connected.set()
        metrics.BUS_CONNECTED.set(1)

    async def _on_disconnected(self) -> None:
        if self._closing or not self._connected.is_set():
            return
        self._connected.clear()
        metrics.BUS_CONNECTED.set(0)
        metrics.BUS_DISCONNECTS.inc()
        log.warning("nats disconnected", url=self._endpoints.nats_url)
        for listener in self.on_lost:
            listener()

    async def _on_reconnected(self) -> None:
        self._set_connected()
        log.info("nats reconnected", url=self._endpoints.nats_url)
        for listener in self.on_restored:
            listener()

    async def _on_client_closed(self) -> None:
        if self._closing:
            return
        self._closed_reason = str(self.client.last_error or "by the server")
        metrics.BUS_CONNECTED.set(0)
        log.error("nats closed the connection", reason=self._closed_reason)
        self._connected.set()
        for listener in self.on_lost:
            listener()
        self.on_closed(self._closed_reason)

    async def _on_error(self, error: Exception) -> None:
        metrics.BUS_ERRORS.labels(type(error).__name__).inc()
        if isinstance(error, nats.errors.SlowConsumerError):
            metrics.BUS_DROPPED.labels(error.subject).inc()
            log.error("message dropped: subscription full", subject=error.subject)
        elif isinstance(error, nats.errors.AuthorizationError) or "authorization" in str(error).lower():
            self._refused.set()
        elif self.client.is_connected:
            log.error("nats error", error=str(error) or type(error).__name__)
        else:
            self._log_down(error)

    def _log_down(self, error: Exception) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_down_s >= LOG_DOWN_EVERY_S:
            self._logged_down_s = now_s
            log.warning(
                "waiting for nats",
                url=self._endpoints.nats_url,
                error=str(error) or type(error).__name__,
            )
