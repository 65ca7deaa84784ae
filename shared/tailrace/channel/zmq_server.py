"""The channel's server over ZMQ: one ROUTER for all clients.

A ROUTER drops what it cannot route unless it is told to refuse (it is): a client that is gone is
noticed at the next frame for it. Its buffers are bounded per client; a ROUTER does not tell when one
has room again, so frames for a slow client are tried again every few milliseconds.
"""

from __future__ import annotations

import asyncio
from collections import deque

import zmq

from tailrace.channel.config import SERVER_DEFAULTS, ServerChannelConfig
from tailrace.channel.errors import EndpointError
from tailrace.channel.ports import LinkLoss, WireEvents
from tailrace.channel.server import LinkedGenerateServer
from tailrace.channel.server_link import Peer
from tailrace.channel.zmq_socket import (
    MAX_FRAME_BYTES,
    MAX_FRAMES_PER_WAKE,
    CurveKeys,
    Socket,
    SocketReader,
    make_socket,
)
from tailrace.log import get_logger

_log = get_logger(__name__)

_PEER_RETRY_S = 0.002
_FINISH_S = 1.0  # for slow clients to take what is queued for them when the server stops


class ZmqServerWire:
    """Frames to one routing id of the server's ROUTER."""

    def __init__(self, transport: ZmqServerTransport, peer: bytes, link: WireEvents) -> None:
        self.max_frame_bytes = MAX_FRAME_BYTES
        self._transport = transport
        self._peer = peer
        self._link = link
        self._queue: deque[bytearray] = deque()
        self._closed = False

    def send(self, frame: bytearray) -> None:
        """See `Wire`."""
        if self._closed:
            return
        if self._queue or not self._try_send(frame):
            self._queue.append(frame)
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
            self._queue.clear()
            self._link.on_lost(LinkLoss.DISCONNECTED, "the client's end of the connection closed")
        return True

    def send_queued(self) -> bool:
        """Send what the peer takes, also after `close`; True when nothing is left."""
        while self._queue:
            if not self._try_send(self._queue[0]):
                return False
            if self._queue:  # empty if the peer turned out to be gone
                self._queue.popleft()
        return True

    def close(self) -> None:
        """See `Wire`."""
        self._closed = True


class ZmqServerTransport:
    """One ROUTER for all clients."""

    def __init__(self, endpoint: str, keys: CurveKeys | None = None) -> None:
        self.endpoint = endpoint  # after `start` the real one, where a port was left open
        self._context: zmq.Context[Socket] = zmq.Context()
        self._keys = keys
        self._blocked: set[ZmqServerWire] = set()
        self._retry_timer: asyncio.TimerHandle | None = None
        self._all_sent = asyncio.Event()

    async def start(self, server: LinkedGenerateServer) -> None:
        """Bind; raises `ValueError` when the endpoint cannot be had."""
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
        """Send to a routing id; raises what ZMQ raises."""
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
        """Give slow clients a moment for what is queued for them."""
        self._all_sent.clear()
        if self._blocked:
            try:
                await asyncio.wait_for(self._all_sent.wait(), _FINISH_S)
            except TimeoutError:
                _log.warning("clients did not take what was queued", num_clients=len(self._blocked))


class ZmqGenerateServer(LinkedGenerateServer):
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
        """Where clients connect, once started."""
        return self._zmq.endpoint
