"""Channel over ZMQ, without a broker: a DEALER per client link, one ROUTER per server.

The file descriptor of a ZMQ socket only signals that *something* changed. After each wake-up and each
send, the reader therefore asks the socket for its events and drains it. A round trip of a frame costs
9 µs of processor time this way, and 29 µs with `zmq.asyncio` (futures per frame).

Client: the monitor of a DEALER reports when the server's end closes; the client first reads the frames
received before. A DEALER that reconnects has a new routing id; the server does not know it and refuses
it, so a lost frame is always detected.

Server: a ROUTER drops frames that it cannot route, unless it is told to report them (it is). The next
frame to a client that is gone therefore fails. The ROUTER's buffers are bounded per client, and it does
not report when one has room again; the server retries frames for a slow client every few milliseconds.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import zmq
from zmq.utils.monitor import parse_monitor_message

from tailrace.channel.client import LinkedGenerateClient
from tailrace.channel.config import (
    CLIENT_DEFAULTS,
    SERVER_DEFAULTS,
    ClientChannelConfig,
    ServerChannelConfig,
)
from tailrace.channel.errors import EndpointError, NoRouteError
from tailrace.channel.ports import Address, LinkEvents, LinkLoss, WireEvents
from tailrace.channel.server import GenerateServer
from tailrace.channel.server_link import Peer
from tailrace.log import get_logger

_log = get_logger(__name__)

MAX_FRAME_BYTES = 8 << 20  # as over NATS: both transports accept the same requests
MAX_FRAMES_PER_WAKE = 64  # then other tasks run
_HIGH_WATER_FRAMES = 16  # per peer and direction inside ZMQ
_LINGER_MS = 200
_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_PEER_RETRY_S = 0.002
_FINISH_S = 1.0  # for slow clients to receive their queued frames when the server stops
_LAST_FRAMES_S = 2.0  # the same when their link ends; one that hangs never reads them

Socket = zmq.Socket[bytes]


class CurveKeys(NamedTuple):
    """CURVE key pair, Z85 text as in `zmq.curve_keypair()`."""

    public: str
    secret: str

    @classmethod
    def generate(cls) -> "CurveKeys":
        """Generates a key pair."""
        public, secret = zmq.curve_keypair()
        return cls(public.decode(), secret.decode())


def make_socket(context: zmq.Context[Socket], kind: int) -> Socket:
    """Makes a socket with bounded buffers and a short linger time."""
    socket = context.socket(kind)
    socket.set_hwm(_HIGH_WATER_FRAMES)
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * MAX_FRAME_BYTES)
    socket.setsockopt(zmq.LINGER, _LINGER_MS)
    return socket


class SocketReader:
    """Reader that calls `on_ready(events)` in the event loop when the socket may be ready."""

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
        """Checks again in the next tick: a send may have consumed the wake-up for a read."""
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
        """Stops the reader; a second call changes nothing: the descriptor may be another's by then."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._fd)


class ZmqClientWire:
    """Client's wire: one DEALER for both directions, and its monitor."""

    def __init__(
        self,
        context: zmq.Context[Socket],
        address: Address,
        keys: CurveKeys,
        link: LinkEvents,
    ) -> None:
        self.max_frame_bytes = MAX_FRAME_BYTES
        self._link = link
        self._queue: deque[bytearray] = deque()
        self._closed = False
        self._socket = make_socket(context, zmq.DEALER)
        if address.zmq_public_key:
            self._socket.curve_serverkey = address.zmq_public_key.encode()
            self._socket.curve_publickey = keys.public.encode()
            self._socket.curve_secretkey = keys.secret.encode()
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED | _HANDSHAKE_FAILURES)
        self._socket.connect(address.zmq_endpoint)
        self._reader = SocketReader(self._socket, self._on_ready)
        self._monitor_reader = SocketReader(self._monitor, self._on_monitor)

    def send(self, frame: bytearray) -> None:
        """See `Wire`."""
        if self._queue or not self._try_send(frame):
            self._queue.append(frame)
        self._reader.check()

    def _try_send(self, frame: bytearray) -> bool:
        try:
            self._socket.send(frame, zmq.DONTWAIT)
        except zmq.Again:
            return False
        return True

    def _on_ready(self, events: int) -> bool:
        if events & zmq.POLLOUT and self._queue:
            self._send_queued()
        return bool(events & zmq.POLLIN) and self._receive(MAX_FRAMES_PER_WAKE)

    def _receive(self, max_frames: int) -> bool:
        """Passes received frames to the link; returns True if there may be more."""
        for _ in range(max_frames):
            try:
                data = self._socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return False
            self._link.on_frame(data)
            if self._closed:
                return False
        return True

    def _send_queued(self) -> None:
        while self._queue and self._try_send(self._queue[0]):
            self._queue.popleft()

    def _on_monitor(self, _events: int) -> bool:
        try:
            event = parse_monitor_message(self._monitor.recv_multipart(zmq.DONTWAIT))
        except zmq.Again:
            return False
        if event["event"] == zmq.EVENT_DISCONNECTED:
            while not self._closed and self._receive(MAX_FRAMES_PER_WAKE):
                pass  # the last frames of a server that stopped in order
            if not self._closed:
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
    """Client's transport: a DEALER per server."""

    def __init__(self, keys: CurveKeys | None = None) -> None:
        self._keys = keys or CurveKeys.generate()
        self._context: zmq.Context[Socket] = zmq.Context()

    async def start(self) -> None:
        """Returns at once: sockets connect in the background."""

    def open(self, address: Address, link: LinkEvents) -> ZmqClientWire:
        """See `ClientTransport`."""
        if not address.zmq_endpoint:
            raise NoRouteError(address.server_id, "ZMQ")
        return ZmqClientWire(self._context, address, self._keys, link)

    async def close(self) -> None:
        """See `ClientTransport`."""
        await asyncio.to_thread(self._context.term)


class ZmqGenerateClient(LinkedGenerateClient):
    """`GenerateClient` over ZMQ; `keys` is its CURVE key pair (default: a new one)."""

    def __init__(
        self, config: ClientChannelConfig = CLIENT_DEFAULTS, *, keys: CurveKeys | None = None
    ) -> None:
        super().__init__(ZmqClientTransport(keys), config)


class ZmqServerWire:
    """Server's wire: frames to one routing id of the ROUTER."""

    def __init__(self, transport: "ZmqServerTransport", peer: bytes, link: WireEvents) -> None:
        self.max_frame_bytes = MAX_FRAME_BYTES
        self._transport = transport
        self._peer = peer
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._queue: deque[bytearray] = deque()
        self._closed = False
        self._gives_up_s = math.inf

    def send(self, frame: bytearray) -> None:
        """See `Wire`."""
        if self._closed:
            return
        if self._queue or not self._try_send(frame):
            self._queue.append(frame)
            self._transport.retry(self)

    def _try_send(self, frame: bytearray) -> bool:
        """Sends a frame; returns False while ZMQ's buffer for this peer is full."""
        try:
            self._transport.send(self._peer, frame)
        except zmq.Again:
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._closed = True
            self._queue.clear()
            self._link.on_lost(LinkLoss.DISCONNECTED, "the client's end of the connection closed")
        return True

    def send_queued(self) -> bool:
        """Sends queued frames, for a moment also after `close`; returns True when none is left."""
        while self._queue:
            if not self._try_send(self._queue[0]):
                if self._loop.time() < self._gives_up_s:
                    return False
                self._queue.clear()
            if self._queue:  # empty if the peer is gone
                self._queue.popleft()
        return True

    def close(self) -> None:
        """See `Wire`."""
        self._closed = True
        self._gives_up_s = self._loop.time() + _LAST_FRAMES_S


class ZmqServerTransport:
    """Server's transport: one ROUTER for all clients."""

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        self.endpoint = endpoint  # after `start` with the real port
        self._context: zmq.Context[Socket] = zmq.Context()
        self._keys = keys
        self._blocked: set[ZmqServerWire] = set()
        self._retry_timer: asyncio.TimerHandle | None = None
        self._all_sent = asyncio.Event()

    async def start(self, server: GenerateServer) -> None:
        """Binds the endpoint; raises `EndpointError`."""
        self._server = server
        self._socket = make_socket(self._context, zmq.ROUTER)
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
        return ZmqServerWire(self, peer, link)

    def send(self, peer: bytes, frame: bytearray) -> None:
        """Sends to a routing id; raises the errors of ZMQ."""
        self._reader.check()
        self._socket.send_multipart((peer, frame), zmq.DONTWAIT)

    def _on_ready(self, events: int) -> bool:
        if not events & zmq.POLLIN:
            return False
        for _ in range(MAX_FRAMES_PER_WAKE):
            try:
                parts = self._socket.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return False
            self._server.on_frame(parts[0], parts[-1] if len(parts) == 2 else b"")
        return True

    def retry(self, wire: ZmqServerWire) -> None:
        """Schedules a retry of this wire."""
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
        if not self._blocked:
            self._all_sent.set()

    async def stop(self) -> None:
        """See `ServerTransport`."""
        await self._finish()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._reader.close()
        self._socket.close(int(1000 * _FINISH_S))
        await asyncio.to_thread(self._context.term)

    async def _finish(self) -> None:
        """Waits a moment for slow clients to receive their queued frames."""
        self._all_sent.clear()
        if self._blocked:
            try:
                async with asyncio.timeout(_FINISH_S):
                    await self._all_sent.wait()
            except TimeoutError:
                _log.warning(
                    "clients did not receive all queued frames", num_clients=len(self._blocked)
                )


class ZmqGenerateServer(GenerateServer):
    """`GenerateServer` on a ZMQ endpoint (`ipc://` or `tcp://`), encrypted when it has CURVE keys."""

    def __init__(
        self,
        endpoint: str,
        config: ServerChannelConfig = SERVER_DEFAULTS,
        *,
        keys: CurveKeys | None = None,
    ) -> None:
        self._zmq = ZmqServerTransport(endpoint, keys)
        super().__init__(self._zmq, config)

    @property
    def endpoint(self) -> str:
        """Endpoint that clients connect to, once started."""
        return self._zmq.endpoint
