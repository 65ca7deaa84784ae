"""The channel's client over ZMQ: a DEALER per link, no broker between.

A DEALER's monitor tells when the server's end closes; what the server sent before that is in the socket
then and is read first. One that reconnects has a new routing id, which the server takes for an unknown
client and refuses: no frame is ever lost unnoticed.
"""

from __future__ import annotations

import asyncio
from collections import deque

import zmq
from zmq.utils.monitor import parse_monitor_message

from tailrace.channel.client import LinkedGenerateClient
from tailrace.channel.config import CLIENT_DEFAULTS, ClientChannelConfig
from tailrace.channel.errors import NoRouteError
from tailrace.channel.ports import Address, LinkEvents, LinkLoss
from tailrace.channel.zmq_socket import (
    MAX_FRAME_BYTES,
    MAX_FRAMES_PER_WAKE,
    CurveKeys,
    Socket,
    SocketReader,
    make_socket,
)

_HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class ZmqClientWire:
    """One DEALER: the whole link, both directions, and its monitor."""

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
        """Hand on frames that came; whether there may be more."""
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
                pass  # the last words of a server that left in order
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
    """A DEALER per server."""

    def __init__(self, keys: CurveKeys | None = None) -> None:
        self._keys = keys or CurveKeys.generate()
        self._context: zmq.Context[Socket] = zmq.Context()

    async def start(self) -> None:
        """Nothing to wait for: sockets connect in the background."""

    def open(self, address: Address, link: LinkEvents) -> ZmqClientWire:
        """See `ClientTransport`."""
        if not address.zmq_endpoint:
            raise NoRouteError(address.server_id, "ZMQ")
        return ZmqClientWire(self._context, address, self._keys, link)

    async def close(self) -> None:
        """See `ClientTransport`."""
        await asyncio.to_thread(self._context.term)


class ZmqGenerateClient(LinkedGenerateClient):
    """`GenerateClient` over ZMQ; `keys` are its own for CURVE (default: new ones)."""

    def __init__(
        self, config: ClientChannelConfig = CLIENT_DEFAULTS, *, keys: CurveKeys | None = None
    ) -> None:
        super().__init__(ZmqClientTransport(keys), config)
