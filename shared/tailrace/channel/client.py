"""Client of the channel: one link per server, opened on demand, with keepalives.

A *link* connects one client to one server: two sequences of frames. A link ends as a whole: when a
frame is missing, or the server is silent or gone, each call on the link ends with `ChannelError` and
its tokens so far. The next `generate` opens a new link, which never receives frames of the old one.
Silence is counted in keepalive ticks, so that a client with a blocked event loop does not declare a
server dead.
"""

import asyncio
from collections.abc import Callable
from typing import NoReturn, Protocol

from tailrace.channel.call import GenerateCall
from tailrace.channel.config import ClientChannelConfig
from tailrace.channel.errors import (
    ChannelClosedError,
    ChannelFullError,
    DuplicateCallError,
    OversizeRequestError,
)
from tailrace.channel.frames import (
    BadMessage,
    Credit,
    FrameTooLargeError,
    FrameWriter,
    read_chunk_frame,
)
from tailrace.channel.metrics import ChannelMetrics
from tailrace.channel.ports import Address, LinkEvents, LinkLoss, Wire
from tailrace.log import get_logger
from tailrace_protos.base import MalformedMessageError, encode
from tailrace_protos.generation import (
    AbortRequest,
    GenerateRequest,
    ReleasePrefixes,
    RequestFrame,
    TokenChunk,
)

_log = get_logger(__name__)


class ClientTransport(Protocol):
    """Transport of a client's frames."""

    async def start(self) -> None:
        """Prepares for `open`."""

    def open(self, address: Address, link: LinkEvents) -> Wire:
        """Opens a wire to a server; raises `NoRouteError`."""

    async def close(self) -> None:
        """Closes the transport, after all wires."""


class ClientLink:
    """Link to one server: its calls and their frames."""

    def __init__(
        self,
        address: Address,
        transport: ClientTransport,
        config: ClientChannelConfig,
        metrics: ChannelMetrics,
        on_gone: "Callable[[ClientLink], None]",
    ) -> None:
        self.address = address
        self._config = config
        self._metrics = metrics
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._wire = transport.open(address, self)
        self._credit = Credit(config.max_unconfirmed_bytes)
        self._writer = FrameWriter(
            "request_frame",
            config.frame_bytes,
            self._wire.max_frame_bytes,
            self._credit,
            self._on_written,
        )
        self._calls: dict[str, GenerateCall] = {}  # sent, last chunk not seen
        self._waiting: dict[str, GenerateCall] = {}  # oldest first
        self._num_uncounted = 0  # calls begun since the last frame
        self._flush_scheduled = False
        self._silent_ticks = 0
        self._idle_ticks = 0
        self._is_open = True

    def start(self, request: GenerateRequest) -> GenerateCall:
        """Sends a call, or queues it."""
        call_id, server_id = request.call_id, self.address.server_id
        if call_id in self._calls or call_id in self._waiting:
            self._metrics.refused("duplicate")
            raise DuplicateCallError(call_id, server_id)
        call = GenerateCall(request, server_id, self._abort)
        if self._has_capacity() and not self._waiting:
            self._send(call)
            return call
        if len(self._waiting) >= self._config.max_waiting_calls:
            self._metrics.refused("full")
            raise ChannelFullError(server_id, len(self._waiting))
        self._check_size(request)
        self._waiting[call_id] = call
        self._metrics.waiting.inc()
        return call

    def release_prefix(self, episode_id: str) -> None:
        """Sends the release with the next frame, after the aborts of the episode's calls."""
        self._writer.add(ReleasePrefixes((episode_id,)))
        self._schedule_flush()

    def _has_capacity(self) -> bool:
        return len(self._calls) < self._config.max_outstanding_calls and not self._credit.exhausted

    def _send(self, call: GenerateCall) -> None:
        request = call.take_request()
        try:
            self._writer.add(request)
        except FrameTooLargeError as error:
            self._refuse_oversize(request, error)
        self._calls[call.call_id] = call
        self._num_uncounted += 1
        self._schedule_flush()

    def _check_size(self, request: GenerateRequest) -> None:
        """Refuses an oversize request now, since a waiting call is encoded only later."""
        try:
            self._writer.check(request)
        except FrameTooLargeError as error:
            self._refuse_oversize(request, error)

    def _refuse_oversize(self, request: GenerateRequest, error: FrameTooLargeError) -> NoReturn:
        self._metrics.refused("oversize")
        raise OversizeRequestError(request.call_id, error.num_bytes, error.limit_bytes) from error

    def _schedule_flush(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self._is_open and len(self._writer):
            self._writer.emit()

    def _on_written(self, frame: bytearray, _: int, exhausts_credit: bool) -> None:
        self._metrics.frames_out.inc()
        self._metrics.bytes_out.inc(len(frame))
        self._count_begun()
        if exhausts_credit:
            self._metrics.congestions.inc()
        self._wire.send(frame)

    def _count_begun(self) -> None:
        if self._num_uncounted:
            self._metrics.calls.inc(self._num_uncounted)
            self._metrics.in_flight.inc(self._num_uncounted)
            self._num_uncounted = 0

    def _abort(self, call: GenerateCall) -> None:
        if self._waiting.pop(call.call_id, None) is not None:
            self._metrics.waiting.dec()
            call.end_unsent()
        elif call.call_id in self._calls:
            self._writer.add(AbortRequest((call.call_id,)))
            self._schedule_flush()

    def on_frame(self, data: bytes) -> None:
        """Passes the chunks of a frame to their calls."""
        if not self._is_open:
            return
        self._metrics.frames_in.inc()
        self._metrics.bytes_in.inc(len(data))
        self._silent_ticks = 0
        try:
            frame = read_chunk_frame(data)
        except MalformedMessageError as error:
            self._metrics.malformed.inc()
            self.on_lost(LinkLoss.MALFORMED, str(error))
            return
        if frame.broken:
            self.on_lost(LinkLoss.BROKEN, frame.broken)
            return
        if frame.sequence != self._credit.received:
            missed = f"frame {frame.sequence} came instead of {self._credit.received}"
            self.on_lost(LinkLoss.GAP, f"{missed}: tokens were lost")
            return
        self._credit.on_received(len(data), frame.received)
        self._take(frame.messages)
        for bad in frame.bad:
            self._on_bad_chunk(bad)
        self._send_waiting()
        if self._is_open and self._credit.owes_confirmation:
            self._writer.emit()

    def _take(self, chunks: tuple[TokenChunk, ...]) -> None:
        calls, num_ended, num_failed, num_lost = self._calls, 0, 0, 0
        for chunk in chunks:
            call = calls.get(chunk.call_id)
            if call is None:
                self._metrics.stray.inc()
                continue
            was_lost = call.ended
            if not call.feed(chunk):
                self._abort_at_server(call)
                was_lost = True
            if chunk.finish_reason is not None or chunk.error is not None:
                num_ended += 1
                num_lost += was_lost
                num_failed += chunk.finish_reason is None and not was_lost
                del calls[chunk.call_id]
        if chunks:
            self._metrics.chunks.inc(len(chunks))
        if num_ended:
            self._metrics.in_flight.dec(num_ended)
            self._count_ended(num_ended - num_failed - num_lost, num_failed)

    def _count_ended(self, num_finished: int, num_failed: int) -> None:
        if num_finished:
            self._metrics.finished.inc(num_finished)
        if num_failed:
            self._metrics.failed.inc(num_failed)

    def _abort_at_server(self, call: GenerateCall) -> None:
        """Aborts a lost call at the server; its id stays in use until the server's last chunk."""
        self._metrics.lost.inc()
        self._writer.add(AbortRequest((call.call_id,)))
        self._schedule_flush()

    def _on_bad_chunk(self, bad: BadMessage) -> None:
        self._metrics.malformed.inc()
        call = self._calls.get(bad.call_id)
        if call is None:  # an unknown call misses tokens
            self.on_lost(LinkLoss.MALFORMED, f"the server sent a malformed chunk: {bad.reason}")
        elif not call.ended:
            call.fail(f"the server sent a malformed chunk: {bad.reason}")
            self._abort_at_server(call)

    def _send_waiting(self) -> None:
        while self._waiting and self._has_capacity():
            call = self._waiting.pop(next(iter(self._waiting)))
            self._metrics.waiting.dec()
            self._send(call)

    def on_lost(self, cause: LinkLoss, detail: str) -> None:
        """Ends the link and its calls; tells the server if it is reachable."""
        if not self._is_open:
            return
        self._is_open = False
        self._metrics.link_lost(cause.value)
        if self._calls or self._waiting:
            _log.warning(
                "generation link lost",
                server_id=self.address.server_id,
                cause=cause.value,
                detail=detail,
                num_calls=len(self._calls) + len(self._waiting),
            )
        self._count_begun()
        self._shut_wire()
        self._on_gone(self)
        self._metrics.in_flight.dec(len(self._calls))
        self._metrics.waiting.dec(len(self._waiting))
        left = [call for call in (*self._calls.values(), *self._waiting.values()) if not call.ended]
        self._metrics.lost.inc(len(left))
        for call in left:
            call.fail(f"{cause.value}: {detail}")
        self._calls.clear()
        self._waiting.clear()

    def _shut_wire(self) -> None:
        self._wire.send(
            bytearray(encode(RequestFrame(self._writer.sequence, self._credit.received, closing=True)))
        )
        self._wire.close()

    def tick(self) -> None:
        """Runs once per `keepalive_s`: sends a frame, ends silent links and calls."""
        config = self._config
        self._silent_ticks += 1
        if self._silent_ticks > config.ticks(config.silence_s):
            self.on_lost(LinkLoss.SILENT, f"no frame for {config.silence_s:g} s")
            return
        self._idle_ticks = 0 if self._calls or self._waiting else self._idle_ticks + 1
        if self._idle_ticks > config.ticks(config.idle_link_s):
            self.on_lost(LinkLoss.CLOSED, "idle")
            return
        self._end_quiet_calls(config.ticks(config.chunk_timeout_s))
        self._writer.emit()

    def _end_quiet_calls(self, max_ticks: int) -> None:
        for call in self._calls.values():
            call.quiet_ticks += 1
            if call.quiet_ticks > max_ticks and not call.ended:
                call.fail(f"no chunk for {self._config.chunk_timeout_s:g} s")
                self._abort_at_server(call)


class LinkedGenerateClient:
    """`GenerateClient` over any `ClientTransport`."""

    def __init__(self, transport: ClientTransport, config: ClientChannelConfig) -> None:
        self._transport = transport
        self._config = config
        self._metrics = ChannelMetrics("client")
        self._links: dict[Address, ClientLink] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    async def start(self) -> None:
        """Prepares for `generate`."""
        await self._transport.start()
        self._schedule_tick()

    def generate(self, address: Address, request: GenerateRequest) -> GenerateCall:
        """See `GenerateClient.generate`."""
        link = self._links.get(address)
        if link is None:
            link = self._open(address)
        return link.start(request)

    def release_prefix(self, address: Address, episode_id: str) -> None:
        """See `GenerateClient.release_prefix`."""
        link = self._links.get(address)
        if link is not None:
            link.release_prefix(episode_id)

    def _open(self, address: Address) -> ClientLink:
        if self._closed:
            raise ChannelClosedError
        link = ClientLink(address, self._transport, self._config, self._metrics, self._forget)
        self._links[address] = link
        return link

    def _forget(self, link: ClientLink) -> None:
        if self._links.get(link.address) is link:
            del self._links[link.address]

    def _schedule_tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._config.keepalive_s, self._tick)

    def _tick(self) -> None:
        self._schedule_tick()
        for link in list(self._links.values()):
            link.tick()

    async def close(self) -> None:
        """Ends all calls, here and at their servers."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for link in list(self._links.values()):
            link.on_lost(LinkLoss.CLOSED, "the client was closed")
        await self._transport.close()
