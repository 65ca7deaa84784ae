"""One client's calls at a server and the frames that answer them.

A link ends as a whole: when a frame of the client is missing, when it is silent or gone, or when the
server stops. What the engine still sends for its calls is then dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from tailrace.channel.config import ServerChannelConfig
from tailrace.channel.credit import Credit
from tailrace.channel.frames import FrameTooLargeError, FrameWriter
from tailrace.channel.metrics import ChannelMetrics
from tailrace.channel.ports import LinkLoss, Wire, WireEvents
from tailrace.channel.sink import CallSink
from tailrace_protos.base import encode
from tailrace_protos.generation import ChunkFrame, TokenChunk

Peer = str | bytes  # reply subject or routing id: what the transport answers to

OpenWire = Callable[[Peer, WireEvents], Wire]


class LinkOwner(Protocol):
    """What a link needs of its server."""

    loop: asyncio.AbstractEventLoop
    config: ServerChannelConfig
    metrics: ChannelMetrics

    def linger(self, sink: CallSink) -> None:
        """Flush this call when the stream interval is over."""

    def on_done(self, sink: CallSink) -> None:
        """The engine's last chunk of a call."""

    def count(self) -> None:
        """Tell the metrics what began and ended."""

    def drop(self, link: ServerLink, cause: LinkLoss, detail: str) -> None:
        """End a link and abort its calls."""


class ServerLink:
    """One client's calls and the frames that answer them."""

    def __init__(self, peer: Peer, server: LinkOwner, open_wire: OpenWire) -> None:
        self.peer = peer
        self.calls: dict[str, CallSink] = {}  # accepted, last chunk not written
        self.silent_ticks = 0
        self.is_open = True
        self._server = server
        self._wire = open_wire(peer, self)
        self._credit = Credit(server.config.max_unconfirmed_bytes)
        self._writer = FrameWriter(
            "chunk_frame",
            server.config.frame_bytes,
            self._wire.max_frame_bytes,
            self._credit,
            self._on_written,
        )
        self._ready: list[CallSink] = []

    @property
    def congested(self) -> bool:
        """Whether the client is slow to take frames."""
        return self._credit.exhausted

    def schedule(self, sink: CallSink) -> None:
        """Send what this call has at the end of the loop tick."""
        if not self._ready:
            self._server.loop.call_soon(self.flush)
        self._ready.append(sink)

    def flush(self) -> None:
        """Send the frames of this tick."""
        ready, self._ready = self._ready, []
        for sink in ready:
            self._write(sink.take())
        if self.is_open and len(self._writer):
            self._writer.emit()

    def _write(self, chunks: list[TokenChunk]) -> None:
        try:
            for chunk in chunks:
                if self.is_open:
                    self._writer.add(chunk)
        except FrameTooLargeError as error:  # only its stop string or error reason can be that long
            self._server.drop(self, LinkLoss.MALFORMED, f"chunk of {error.num_bytes} bytes")

    @property
    def expected_sequence(self) -> int:
        """Of the client's next frame."""
        return self._credit.received

    def take(self, num_bytes: int, confirmed: int) -> None:
        """Count a frame that came in order."""
        self.silent_ticks = 0
        self._credit.on_received(num_bytes, confirmed)

    def answer(self) -> None:
        """Send a frame even if there is nothing to say: the client wants to know that we live."""
        self._writer.emit()

    def confirm(self) -> None:
        """Tell a client that has sent much that it may go on."""
        if self.is_open and self._credit.owes_confirmation:
            self._writer.emit()

    def linger(self, sink: CallSink) -> None:
        """Flush this call at the next stream interval."""
        self._server.linger(sink)

    def on_done(self, sink: CallSink) -> None:
        """The engine is done with a call."""
        if self.calls.get(sink.call_id) is sink:
            del self.calls[sink.call_id]
        self._server.on_done(sink)

    def _on_written(self, frame: bytearray, num_chunks: int, exhausts_credit: bool) -> None:
        metrics = self._server.metrics
        metrics.frames_out.inc()
        metrics.bytes_out.inc(len(frame))
        metrics.chunks.inc(num_chunks)
        self._server.count()
        if exhausts_credit:
            metrics.congestions.inc()
        self._wire.send(frame)

    def on_lost(self, cause: LinkLoss, detail: str) -> None:
        """The transport knows that the client is gone."""
        self._server.drop(self, cause, detail)

    def shut(self, broken: str) -> None:
        """Tell the client, if it still hears, and forget it."""
        self.is_open = False
        if broken:
            self._wire.send(
                bytearray(
                    encode(ChunkFrame(self._writer.sequence, self._credit.received, broken=broken))
                )
            )
        self._wire.close()
