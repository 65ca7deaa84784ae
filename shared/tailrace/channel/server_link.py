"""Calls of one client at a server, and the frames that answer them.

The engine has already coalesced the tokens of a call, so the chunks of a loop tick leave at its end.
While the client is slow (no credit) the chunks of a call wait and grow into one chunk.

A link ends as a whole: when a frame of the client is missing, when the client is silent or gone, or
when the server stops. Later chunks of the engine for its calls are dropped.
"""

import asyncio
from collections.abc import Callable

from tailrace.channel.config import ServerChannelConfig
from tailrace.channel.frames import Credit, FrameWriter
from tailrace.channel.generation import merge_chunks, split_chunk
from tailrace.channel.metrics import ChannelMetrics
from tailrace.channel.ports import LinkLoss, Wire, WireEvents
from tailrace.channel.top_logprobs import num_top_logprobs
from tailrace_protos.base import encode
from tailrace_protos.generation import CallError, CallErrorCode, ChunkFrame, TokenChunk

MAX_CHUNK_TOKENS = 65536  # 512 KiB of ids and log-probabilities: a chunk fits into a frame

Peer = str | bytes  # reply subject or routing id: the address of a client in its transport

OpenWire = Callable[[Peer, WireEvents], Wire]


class CallSink:
    """`ChunkSink` of one call. It outlives its link: an engine may finish an abandoned call."""

    __slots__ = ("_link", "_parts", "_scheduled", "call_id", "done", "muted")

    def __init__(self, call_id: str, link: "ServerLink") -> None:
        self.call_id = call_id
        self.done = False  # the engine sent the last chunk
        self.muted = False  # the client is gone
        self._link = link
        self._scheduled = False  # in the link's list of calls to send
        self._parts: list[TokenChunk] = []

    def send(self, chunk: TokenChunk) -> None:
        """See `ChunkSink.send`."""
        if self.done:
            return
        if chunk.finish_reason is not None or chunk.error is not None:
            self.done = True
            self._link.on_done(self)
        if self.muted:
            return
        self._parts.append(chunk)
        if not self._scheduled:
            self._scheduled = True
            self._link.schedule(self)

    def fail(self, code: CallErrorCode, reason: str, retry_after_s: float = 0.0) -> None:
        """Ends the call with an error."""
        self.send(TokenChunk(self.call_id, error=CallError(code, reason, retry_after_s)))

    def take(self) -> list[TokenChunk]:
        """Returns all waiting tokens: one chunk, or several if one would exceed a frame."""
        self._scheduled = False
        parts, self._parts = self._parts, []
        chunk = parts[0] if len(parts) == 1 else merge_chunks(parts)
        limit = MAX_CHUNK_TOKENS
        if chunk.top_ids:
            limit //= 1 + num_top_logprobs(chunk)
        return [chunk] if len(chunk.token_ids) <= 4 * limit else split_chunk(chunk, limit)


class ServerCalls:
    """Unfinished calls of one server, over all its links, and their counts for the metrics."""

    def __init__(self) -> None:
        self.metrics = ChannelMetrics("server")
        self.by_id: dict[str, CallSink] = {}  # until the engine's last chunk
        self._num_begun = 0  # since the last update of the metrics
        self._num_ended = 0

    def begin(self, sink: CallSink) -> None:
        """Adds a call."""
        self.by_id[sink.call_id] = sink
        self._num_begun += 1

    def end(self, sink: CallSink) -> None:
        """Removes a call after the engine's last chunk; its id is free again."""
        if self.by_id.get(sink.call_id) is sink:
            del self.by_id[sink.call_id]
            self._num_ended += 1

    def update_metrics(self) -> None:
        """Counts begun and ended calls, once per frame instead of once per call."""
        begun, ended = self._num_begun, self._num_ended
        self._num_begun = self._num_ended = 0
        if begun:
            self.metrics.calls.inc(begun)
        if ended:
            self.metrics.finished.inc(ended)
        if begun != ended:
            self.metrics.in_flight.inc(begun - ended)


class ServerLink:
    """Link to one client. `drop` ends the link and aborts its calls."""

    def __init__(
        self,
        peer: Peer,
        config: ServerChannelConfig,
        server_calls: ServerCalls,
        open_wire: OpenWire,
        drop: "Callable[[ServerLink, LinkLoss, str], None]",
    ) -> None:
        self.peer = peer
        self.calls: dict[str, CallSink] = {}  # accepted, last chunk not written
        self.silent_ticks = 0
        self.is_open = True
        self._server_calls = server_calls
        self._drop = drop
        self._loop = asyncio.get_running_loop()
        self._wire = open_wire(peer, self)
        self._credit = Credit(config.max_unconfirmed_bytes)
        self._writer = FrameWriter(
            "chunk_frame",
            config.frame_bytes,
            self._wire.max_frame_bytes,
            self._credit,
            self._on_written,
        )
        self._ready: list[CallSink] = []  # calls with chunks to send

    def schedule(self, sink: CallSink) -> None:
        """Sends the chunks of this call at the end of the loop tick, or once the client has credit."""
        if not self._ready and not self._credit.exhausted:
            self._loop.call_soon(self.flush)
        self._ready.append(sink)

    def flush(self) -> None:
        """Sends the frames of this tick; without credit the chunks wait for `take`."""
        if self._credit.exhausted:
            return
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
        except (TypeError, ValueError) as error:  # its stop string or reason is too long, or no text
            self._drop(self, LinkLoss.MALFORMED, f"chunk that cannot be sent: {error}")

    @property
    def expected_sequence(self) -> int:
        """Sequence number of the client's next frame."""
        return self._credit.received

    def take(self, num_bytes: int, confirmed: int) -> None:
        """Counts a frame that arrived in order; its confirmation may give credit to waiting chunks."""
        self.silent_ticks = 0
        was_exhausted = self._credit.exhausted
        self._credit.on_received(num_bytes, confirmed)
        if self._ready and was_exhausted and not self._credit.exhausted:
            self._loop.call_soon(self.flush)

    def answer(self) -> None:
        """Sends a frame, even an empty one: it tells the client that the server is alive."""
        self._writer.emit()

    def confirm(self) -> None:
        """Confirms the frames of a client that has sent much, so that it may continue."""
        if self.is_open and self._credit.owes_confirmation:
            self._writer.emit()

    def on_done(self, sink: CallSink) -> None:
        """Removes a call after the engine's last chunk."""
        if self.calls.get(sink.call_id) is sink:
            del self.calls[sink.call_id]
        self._server_calls.end(sink)

    def _on_written(self, frame: bytearray, num_chunks: int, exhausts_credit: bool) -> None:
        metrics = self._server_calls.metrics
        metrics.frames_out.inc()
        metrics.bytes_out.inc(len(frame))
        metrics.chunks.inc(num_chunks)
        self._server_calls.update_metrics()
        if exhausts_credit:
            metrics.congestions.inc()
        self._wire.send(frame)

    def on_lost(self, cause: LinkLoss, detail: str) -> None:
        """Ends the link: the transport reports that the client is gone."""
        self._drop(self, cause, detail)

    def shut(self, broken: str) -> None:
        """Sends the reason to a client that can still receive it, and closes the wire."""
        self.is_open = False
        if broken:
            self._wire.send(
                bytearray(
                    encode(ChunkFrame(self._writer.sequence, self._credit.received, broken=broken))
                )
            )
        self._wire.close()
