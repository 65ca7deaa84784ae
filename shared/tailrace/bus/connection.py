"""The one connection of a process to NATS: credentials, reconnection, limits.

Invariants: it reconnects without a time limit; publishers wait while it is disconnected and fill no
buffer; it never sends a message larger than the server's limit (the server would close the connection);
it counts and logs as an error each message that a full subscription drops. Only a refusal by the server
(wrong password, protocol error) closes it for good; `on_closed` then receives the reason.
"""

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
from nats.aio.client import DEFAULT_FLUSH_TIMEOUT, Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tailrace import metrics
from tailrace.bus.errors import BusClosedError, OversizedMessageError
from tailrace.config import ConfigError, Endpoints
from tailrace.log import get_logger

log = get_logger(__name__)

# nats-py drops messages above these limits; they are far larger than any mailbox, a drop is an error.
PENDING_MESSAGES = 1 << 20
PENDING_BYTES = 512 << 20
WRITE_BUFFER_BYTES = 8 << 20
HEADER_ALLOWANCE_BYTES = 4096
RECONNECT_WAIT_S = 0.2
PING_INTERVAL_S = 5
LOG_DOWN_EVERY_S = 10.0

Headers = dict[str, str]


class _FlushingClient(Client):
    """Client with our `flush`: the `drain` of nats-py drops what arrives after its `flush`."""

    async def flush(self, timeout: int = DEFAULT_FLUSH_TIMEOUT) -> None:
        """See `flush`; `timeout` in seconds, of each ping."""
        for _ in range(2):
            await super().flush(timeout)


class Connection:
    """NATS client that waits while the server is away."""

    def __init__(self, endpoints: Endpoints, name: str) -> None:
        self.client = _FlushingClient()
        self.denied: list[str] = []  # errors of the server about what this user may not do
        self.on_closed: Callable[[str], None] = lambda _reason: None
        self.on_lost: list[Callable[[], None]] = []
        self.on_restored: list[Callable[[], None]] = []
        self._endpoints = endpoints
        self._name = name
        self._connected = asyncio.Event()
        self._refused = asyncio.Event()
        self._giving_up: asyncio.Task[None] | None = None  # a refusal ends a connection that was open
        self._closing = False
        self._was_open = False
        self._closed_reason = ""
        self._logged_down_s = -LOG_DOWN_EVERY_S

    @property
    def is_connected(self) -> bool:
        """True while the client is connected to the server."""
        return self._connected.is_set() and not self._closed_reason

    async def open(self) -> None:
        """Returns once connected, without a time limit; `ConfigError` when the server refuses."""
        user = self._endpoints.nats_user
        connecting = asyncio.create_task(
            self.client.connect(
                self._endpoints.nats_url,
                name=self._name,
                user=user or None,
                password=self._endpoints.nats_password or None,
                tls=_tls(self._endpoints),
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
                raise ConfigError(self._refusal)
            await connecting
        finally:
            connecting.cancel()
            refused.cancel()
        self._set_connected()

    @property
    def _refusal(self) -> str:
        return (
            f"NATS at {self._endpoints.shown_nats_url} refuses user {self._endpoints.nats_user!r}: "
            "check TAILRACE_NATS_USER and TAILRACE_NATS_PASSWORD"
        )

    async def close(self) -> None:
        """Sends the buffered messages, then closes the connection."""
        self._closing = True
        if not self.client.is_closed:
            await self.client.close()
        self._closed_reason = self._closed_reason or "by this process"
        self._connected.set()

    async def wait_connected(self) -> None:
        """Returns once connected; raises `BusClosedError` when the connection is closed for good."""
        await self._connected.wait()
        if self._closed_reason:
            raise BusClosedError(self._closed_reason)

    async def publish(
        self, subject: str, payload: bytes, *, reply: str = "", headers: Headers | None = None
    ) -> None:
        """Sends a message; waits while the server is away."""
        self.check_size(subject, payload, headers)
        num_cancels = _num_cancels()
        while True:
            if not self._connected.is_set() or self._closed_reason:
                await self.wait_connected()
            try:
                await self.client.publish(subject, payload, reply=reply, headers=headers or None)
            except nats.errors.OutboundBufferLimitError:
                await asyncio.sleep(RECONNECT_WAIT_S)
            except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as error:
                raise BusClosedError(self._closed_reason or str(error)) from error
            else:
                if _num_cancels() > num_cancels:
                    raise asyncio.CancelledError  # nats-py drops it while its buffer is full
                return

    async def subscribe(
        self, subject: str, receive: Callable[[Msg], Any], *, queue: str = ""
    ) -> Subscription:
        """Subscribes, with limits far larger than any mailbox; survives reconnections."""
        await self.wait_connected()
        return await self.client.subscribe(
            subject,
            queue=queue,
            cb=receive,
            pending_msgs_limit=PENDING_MESSAGES,
            pending_bytes_limit=PENDING_BYTES,
        )

    async def drain(self, subscription: Subscription) -> None:
        """Unsubscribes and waits for the messages received before; does nothing while disconnected."""
        if self._connected.is_set() and not self.client.is_closed:
            draining: Awaitable[None] = subscription.drain()  # type: ignore[no-untyped-call]
            await draining

    def check_size(self, subject: str, payload: bytes, headers: Headers | None) -> None:
        """Raises `OversizedMessageError` for a message larger than the server accepts."""
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
        self._was_open = True
        self._connected.set()
        metrics.BUS_CONNECTED.set(1)

    async def _on_disconnected(self) -> None:
        if self._closing or not self._connected.is_set():
            return
        self._connected.clear()
        metrics.BUS_CONNECTED.set(0)
        metrics.BUS_DISCONNECTS.inc()
        log.warning("nats disconnected", url=self._endpoints.shown_nats_url)
        for listener in self.on_lost:
            listener()

    async def _on_reconnected(self) -> None:
        self._set_connected()
        log.info("nats reconnected", url=self._endpoints.shown_nats_url)
        for listener in self.on_restored:
            listener()

    async def _on_client_closed(self) -> None:
        if self._closing:
            return
        is_refused = self._refused.is_set()
        self._closed_reason = (
            self._refusal if is_refused else str(self.client.last_error or "by the server")
        )
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
        elif (
            isinstance(error, nats.errors.AuthorizationError)
            or "authorization violation" in str(error).lower()
        ):
            self._refused.set()
            if self._was_open and self._giving_up is None:  # as after a change of the password
                self._giving_up = asyncio.create_task(self.client.close())
        elif self.client.is_connected:
            if "permissions violation" in str(error).lower():
                self.denied.append(str(error))
            log.error("nats error", error=str(error) or type(error).__name__)
        else:
            self._log_down(error)

    def _log_down(self, error: Exception) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_down_s >= LOG_DOWN_EVERY_S:
            self._logged_down_s = now_s
            log.warning(
                "waiting for nats",
                url=self._endpoints.shown_nats_url,
                error=str(error) or type(error).__name__,
            )


def _tls(endpoints: Endpoints) -> ssl.SSLContext | None:
    """Certificates for `tls://`; None for a connection that is not encrypted."""
    if not endpoints.nats_url.startswith("tls://"):
        return None
    try:
        return ssl.create_default_context(cafile=endpoints.ca_file or None)
    except OSError as error:
        raise ConfigError(f"TAILRACE_CA_FILE: cannot read {endpoints.ca_file}: {error}") from error


async def flush(client: Client) -> None:
    """Returns once the server has processed all that `client` sent before, (un)subscriptions included.

    The `flush` of nats-py writes its ping to the socket at once, before the data that its flusher task
    still holds. The answer can therefore arrive before the server knows a subscription. The second
    ping follows that data.
    """
    await Client.flush(client)
    await Client.flush(client)


def _num_cancels() -> int:
    """Cancellations of the running task that it has not taken back."""
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0
