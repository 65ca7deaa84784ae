"""Channel over core NATS: a subject per server, and an inbox per client with one token per link.

Core NATS may lose frames when a connection breaks; the sequence numbers of a link detect it. When no
server listens on a subject, nats-server reports it at once and the link is lost without a wait. The
caller owns the connection (`tailrace.bus` or any nats-py client) and closes it.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakSet

import nats.errors
from nats.aio.client import Client as NatsConnection
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tailrace.bus import flush
from tailrace.channel.client import LinkedGenerateClient
from tailrace.channel.config import (
    CLIENT_DEFAULTS,
    SERVER_DEFAULTS,
    ClientChannelConfig,
    ServerChannelConfig,
)
from tailrace.channel.errors import NoRouteError
from tailrace.channel.ports import Address, LinkEvents, LinkLoss, WireEvents
from tailrace.channel.server import GenerateServer
from tailrace.channel.server_link import Peer

_RETRY_S = 0.05
_FINISH_S = 1.0
_STATUS = "Status"
_NO_RESPONDERS = "503"

# Links limit pending frames; a limit of nats-py would drop frames.
_UNLIMITED: dict[str, Any] = {"pending_msgs_limit": 0, "pending_bytes_limit": 0}


class NatsWire:
    """Wire to one subject; a task publishes the queued frames."""

    def __init__(self, connection: NatsConnection, subject: str, reply: str, link: WireEvents) -> None:
        self.max_frame_bytes = connection.max_payload
        self.reply = reply
        self._connection = connection
        self._subject = subject
        self._link = link
        self._queue: deque[bytearray] = deque()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.on_close: Callable[[], object] | None = None

    def send(self, frame: bytearray) -> None:
        """See `Wire`."""
        if self._closed:
            return
        self._queue.append(frame)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(
                self._publish_all(), name="channel-publish"
            )

    def close(self) -> None:
        """See `Wire`; the publishing task ends after the queued frames."""
        self._closed = True
        if self.on_close is not None:
            self.on_close()

    async def _publish_all(self) -> None:
        try:
            while self._queue:
                await self._publish(self._queue.popleft())
        except (nats.errors.ConnectionClosedError, nats.errors.ConnectionDrainingError) as error:
            self._lose(f"the NATS connection is closed ({type(error).__name__})")
        except (nats.errors.MaxPayloadError, nats.errors.BadSubjectError) as error:
            self._lose(f"NATS refuses the frame: {error}")
        finally:
            self._task = None

    async def _publish(self, frame: bytearray) -> None:
        """Publishes; retries while NATS is away and the connection's buffer is full."""
        while True:
            try:
                # nats-py also accepts a bytearray: it joins the payload with its own bytes.
                await self._connection.publish(self._subject, frame, self.reply)  # type: ignore[arg-type]
                return
            except nats.errors.OutboundBufferLimitError:
                await asyncio.sleep(_RETRY_S)

    def _lose(self, detail: str) -> None:
        self._closed = True
        self._queue.clear()
        self._link.on_lost(LinkLoss.DISCONNECTED, detail)

    async def finish(self) -> None:
        """Waits until all queued frames are published."""
        if self._task is not None:
            await self._task


class _Wires:
    """Wires of one transport."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._wires: WeakSet[NatsWire] = WeakSet()

    def open(self, subject: str, reply: str, link: WireEvents) -> NatsWire:
        wire = NatsWire(self._connection, subject, reply, link)
        self._wires.add(wire)
        return wire

    async def finish(self, subscription: Subscription | None) -> None:
        """Publishes queued frames for at most one second, then unsubscribes."""
        tasks = [asyncio.ensure_future(wire.finish()) for wire in list(self._wires)]
        if tasks:
            _, unfinished = await asyncio.wait(tasks, timeout=_FINISH_S)
            for task in unfinished:
                task.cancel()
        try:
            if subscription is not None:
                await subscription.unsubscribe()
            await self._connection.flush(timeout=1)
        except nats.errors.Error:
            return  # the connection is away or closed: its owner reports it


class NatsClientTransport:
    """One inbox; the last token of the reply subject identifies the link."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        self._inbox = connection.new_inbox()
        self._numbers = itertools.count()
        self._links: dict[str, LinkEvents] = {}
        self._wires = _Wires(connection)
        self._subscription: Subscription | None = None

    async def start(self) -> None:
        """Subscribes to the inbox."""
        subject = f"{self._inbox}.*"
        self._subscription = await self._connection.subscribe(
            subject, cb=self._on_message, **_UNLIMITED
        )

    def open(self, address: Address, link: LinkEvents) -> NatsWire:
        """See `ClientTransport`."""
        if not address.nats_subject:
            raise NoRouteError(address.server_id, "NATS")
        reply = f"{self._inbox}.{next(self._numbers)}"
        wire = self._wires.open(address.nats_subject, reply, link)
        wire.on_close = partial(self._links.pop, reply, None)
        self._links[reply] = link
        return wire

    async def _on_message(self, message: Msg) -> None:
        link = self._links.get(message.subject)
        if link is None:
            return  # of a closed link
        if message.headers and message.headers.get(_STATUS) == _NO_RESPONDERS:
            link.on_lost(LinkLoss.NO_RESPONDER, "no server listens on its subject")
        else:
            link.on_frame(message.data)

    async def close(self) -> None:
        """See `ClientTransport`."""
        await self._wires.finish(self._subscription)


class NatsServerTransport:
    """Requests arrive on the server's subject; answers go to the client's reply subject."""

    def __init__(self, connection: NatsConnection, subject: str) -> None:
        self._connection = connection
        self._subject = subject
        self._wires = _Wires(connection)
        self._subscription: Subscription | None = None

    async def start(self, server: GenerateServer) -> None:
        """See `ServerTransport`."""
        self._server = server
        self._subscription = await self._connection.subscribe(
            self._subject, cb=self._on_message, **_UNLIMITED
        )
        await flush(self._connection)  # from now on nats-server routes requests to this server

    def open(self, peer: Peer, link: WireEvents) -> NatsWire:
        """See `ServerTransport`."""
        assert isinstance(peer, str)
        return self._wires.open(peer, "", link)

    async def _on_message(self, message: Msg) -> None:
        self._server.on_frame(message.reply, message.data)

    async def stop(self) -> None:
        """See `ServerTransport`."""
        await self._wires.finish(self._subscription)


class NatsGenerateClient(LinkedGenerateClient):
    """`GenerateClient` over a NATS connection."""

    def __init__(
        self, connection: NatsConnection, config: ClientChannelConfig = CLIENT_DEFAULTS
    ) -> None:
        super().__init__(NatsClientTransport(connection), config)


class NatsGenerateServer(GenerateServer):
    """`GenerateServer` on a subject of a NATS connection."""

    def __init__(
        self, connection: NatsConnection, subject: str, config: ServerChannelConfig = SERVER_DEFAULTS
    ) -> None:
        super().__init__(NatsServerTransport(connection, subject), config)
