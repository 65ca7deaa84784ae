"""The channel over ZMQ: a ROUTER per server, a DEALER per link, no broker between.

The sockets are read and written without blocking from the event loop: their file descriptor only says
that *something* changed, so after every wake-up and every send the socket is drained until it has
nothing more. A ROUTER is told to refuse what it cannot route (it would drop it), high-water marks are
bounded, and a DEALER's monitor tells when the server's end closes. A DEALER that reconnected has a new
routing id, which the server takes for an unknown client and refuses: no frame is ever lost unnoticed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from tailrace.channel.client import LinkedGenerateClient
from tailrace.channel.config import DEFAULTS, ChannelConfig
from tailrace.channel.errors import NoRouteError
from tailrace.channel.outbox import Outbox
from tailrace.channel.ports import Address, LinkEvents, LinkLoss, WireEvents
from tailrace.channel.server import LinkedGenerateServer, Peer

MAX_FRAME_BYTES = 1 << 20  # as over NATS, so that what one transport takes the other does too
_HIGH_WATER_FRAMES = 16  # per peer and direction inside ZMQ
_MAX_FRAMES_PER_WAKE = 64  # then other tasks get a turn
_PEER_RETRY_S = 0.002
_LINGER_MS = 200
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)

Socket = zmq.Socket[bytes]


class CurveKeys(NamedTuple):
    """A CURVE key pair, Z85 text as in `zmq.curve_keypair()`."""

    public: str
    secret: str

    @classmethod
    def generate(cls) -> CurveKeys:
        """A new pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


def _make_socket(context: zmq.Context[Socket], kind: int) -> Socket:
    socket = context.socket(kind)
    socket.set_hwm(_HIGH_WATER_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    return socket


class SocketReader:
    """Calls `on_ready(events)` in the event loop whenever the socket may be read or written."""

    def __init__(self, socket: Socket, on_ready: Callable[[int], bool]) -> None:
        self._socket = socket
        self._on_ready = on_ready
        self._fd = int(socket.getsockopt(zmq.FD))
        self._loop = asyncio.get_running_loop()
        self._scheduled = False
        self._closed = False
        self._loop.add_reader(self._fd, self._wake)
        self.check()

    def check(self) -> None:
        """Look again in the next tick: sending consumed a wake-up that may have been about reading."""
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self._rewake)

    def _rewake(self) -> None:
        self._scheduled = False
        self._wake()

    def _wake(self) -> None:
        if self._closed:
            return
        events = int(self._socket.getsockopt(zmq.EVENTS))
        if events and self._on_ready(events):
            self.check()

    def close(self) -> None:
        """Stop looking."""
        self._closed = True
        self._loop.remove_reader(self._fd)


class ZmqClientWire:
    """One DEALER: the whole link, both directions, and its monitor."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        address: Address,
        keys: CurveKeys,
        link: LinkEvents,
        max_bytes: int,
    ) -> None:
        self.max_frame_bytes = MAX_FRAME_BYTES
        self._link = link
        self._outbox = Outbox(max_bytes)
        self._closed = False
        self._socket = _make_socket(context, zmq.DEALER)
        if address.zmq_public_key:
            self._socket.curve_serverkey = address.zmq_public_key.encode()
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILURES)
        self._socket.connect(address.zmq_endpoint)
        self._reader = SocketReader(self._socket, self._on_ready)
        self._monitor_reader = SocketReader(self._monitor, self._on_monitor)

    @property
    def congested(self) -> bool:
        """See `Wire`."""
        return self._outbox.congested

    def send(self, frame: bytearray) -> None:
        """See `Wire`."""
        if self._outbox or not self._try_send(frame):
            self._outbox.put(frame)
        self._reader.check()

    def _try_send(self, frame: bytearray) -> bool:
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _on_ready(self, events: int) -> bool:
        if events & zmq.POLLOUT and self._outbox:
            self._send_queued()
        if not events & zmq.POLLIN:
            return False
        for _ in range(_MAX_FRAMES_PER_WAKE):
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return False
            self._link.on_frame(data)
            if self._closed:
                return False
        return True

    def _send_queued(self) -> None:
        outbox = self._outbox
        while outbox and self._try_send(outbox.first):
            if outbox.pop():
                self._link.on_drained()

    def _on_monitor(self, _events: int) -> bool:
        try:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            return False
        if event["event"] == zmq.EVENT_DISCONNECTED:
            self._link.on_lost(LinkLoss.DISCONNECTED, "the server's end of the connection closed")
        else:
            self._link.on_lost(LinkLoss.HANDSHAKE, "CURVE handshake failed: wrong keys?")
        return not self._closed

    def close(self) -> None:
        """See `Wire`."""
        if self._closed:
            return
        self._closed = True
        self._monitor_reader.close()
        self._reader.close()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()


class ZmqClientTransport:
    """A DEALER per server."""

    def __init__(self, config: ChannelConfig, keys: CurveKeys | None = None) -> None:
        self._config = config
        self._keys = keys or CurveKeys.generate()
        self._context: zmq.Context[Socket] = zmq.Context()

    async def start(self) -> None:
        """Nothing to wait for: sockets connect in the background."""

    def open(self, address: Address, link: LinkEvents) -> ZmqClientWire:
        """See `ClientTransport`."""
        if not address.zmq_endpoint:
            raise NoRouteError(address.server_id, "ZMQ")
        return ZmqClientWire(self._context, address, self._keys, link, self._config.max_queued_bytes)

    async def close(self) -> None:
        """See `ClientTransport`."""
        await asyncio.to_thread(self._context.term)


class ZmqServerWire:
    """Frames to one routing id of the server's ROUTER."""

    def __init__(
        self, transport: ZmqServerTransport, peer: bytes, link: WireEvents, max_bytes: int
    ) -> None:
        self.max_frame_bytes = MAX_FRAME_BYTES
        self._transport = transport
        self._peer = peer
        self._link = link
        self._outbox = Outbox(max_bytes)
        self._closed = False

    @property
    def congested(self) -> bool:
        """See `Wire`."""
        return self._outbox.congested

    def send(self, frame: bytearray) -> None:
        """See `Wire`."""
        if self._closed:
            return
        if self._outbox or not self._try_send(frame):
            self._outbox.put(frame)
            self._transport.retry(self)

    def _try_send(self, frame: bytearray) -> bool:
        """False while ZMQ's buffer for this peer is full."""
        try:
            self._transport.send(self._peer, frame)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._closed = True
            self._outbox.clear()
            self._link.on_lost(LinkLoss.DISCONNECTED, "the client's end of the connection closed")
        return True

    def send_queued(self) -> bool:
        """Send what the peer takes; True when nothing is left."""
        outbox = self._outbox
        while outbox:
            if not self._try_send(outbox.first):
                return False
            if outbox and outbox.pop():
                self._link.on_drained()
        return True

    def close(self) -> None:
        """See `Wire`."""
        self._closed = True
        self._outbox.clear()


class ZmqServerTransport:
    """One ROUTER for all clients."""

    def __init__(self, endpoint: str, config: ChannelConfig, keys: CurveKeys | None = None) -> None:
        self.endpoint = endpoint  # after `start` the real one, where a port was left open
        self._config = config
        self._context: zmq.Context[Socket] = zmq.Context()
        self._keys = keys
        self._blocked: set[ZmqServerWire] = set()
        self._retry_timer: asyncio.TimerHandle | None = None

    async def start(self, server: LinkedGenerateServer) -> None:
        """Bind; raises `ValueError` when the endpoint cannot be had."""
        self._server = server
        self._socket = _make_socket(self._context, zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._keys is not None:
            self._socket.curve_server = True
            self._socket.curve_publickey = self._keys.public.encode()
            self._socket.curve_secretkey = self._keys.secret.encode()
        try:
            self._socket.bind(self.endpoint)
        except zmq.ZMQError as error:
            self._socket.close(0)
            raise EndpointError(self.endpoint, str(error)) from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._reader = SocketReader(self._socket, self._on_ready)

    def open(self, peer: Peer, link: WireEvents) -> ZmqServerWire:
        """See `ServerTransport`."""
        assert isinstance(peer, bytes)
        return ZmqServerWire(self, peer, link, self._config.max_queued_bytes)

    def send(self, peer: bytes, frame: bytearray) -> None:
        """Send to a routing id; raises what ZMQ raises."""
        self._reader.check()
        self._socket.send_multipart((peer, frame), zmq.DONTWAIT)

    def _on_ready(self, events: int) -> bool:
        if not events & zmq.POLLIN:
            return False
        for _ in range(_MAX_FRAMES_PER_WAKE):
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return False
            self._server.on_frame(parts[0], parts[-1] if len(parts) == 2 else b"")
        return True

    def retry(self, wire: ZmqServerWire) -> None:
        """Try this wire again soon: a ROUTER does not tell when a peer's buffer has room."""
        self._blocked.add(wire)
        if self._retry_timer is None:
            loop = asyncio.get_running_loop()
            self._retry_timer = loop.call_later(_PEER_RETRY_S, self._send_blocked)

    def _send_blocked(self) -> None:
        self._retry_timer = None
        blocked, self._blocked = self._blocked, set()
        for wire in blocked:
            if not wire.send_queued():
                self.retry(wire)

    async def stop(self) -> None:
        """See `ServerTransport`."""
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._reader.close()
        self._socket.close()
        await asyncio.to_thread(self._context.term)


class EndpointError(ValueError):
    """A ZMQ endpoint that cannot be bound."""

    def __init__(self, endpoint: str, reason: str) -> None:
        super().__init__(
            f"cannot listen on {endpoint!r}: {reason}; use "
            "ipc:///<path of at most 107 characters in an existing directory> or "
            "tcp://<interface>:* for a free port"
        )
        self.endpoint = endpoint
        self.reason = reason


class ZmqGenerateClient(LinkedGenerateClient):
    """`GenerateClient` over ZMQ; `keys` are its own for CURVE (default: new ones)."""

    def __init__(self, config: ChannelConfig = DEFAULTS, *, keys: CurveKeys | None = None) -> None:
        super().__init__(ZmqClientTransport(config, keys), config)


class ZmqGenerateServer(LinkedGenerateServer):
    """`GenerateServer` on a ZMQ endpoint (`ipc://` or `tcp://`), encrypted when it has CURVE keys."""

    def __init__(
        self, endpoint: str, config: ChannelConfig = DEFAULTS, *, keys: CurveKeys | None = None
    ) -> None:
        self._zmq = ZmqServerTransport(endpoint, config, keys)
        super().__init__(self._zmq, config)

    @property
    def endpoint(self) -> str:
        """Where clients connect, once started."""
        return self._zmq.endpoint
