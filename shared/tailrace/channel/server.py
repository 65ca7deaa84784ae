"""The server side of the channel, whatever carries the frames.

Invariants: every request that arrives is answered by exactly one last chunk or by the end of its link;
a call id is in use until the engine's last chunk, so an engine never sees it twice at once; nothing a
client sends can stop the server; calls of a client that is gone are aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Protocol

from tailrace.channel.config import ServerChannelConfig
from tailrace.channel.frames import Envelope, read_request_frame
from tailrace.channel.metrics import ChannelMetrics
from tailrace.channel.ports import GenerateHandler, LinkLoss, Wire, WireEvents
from tailrace.channel.server_link import Peer, ServerLink
from tailrace.channel.sink import CallSink
from tailrace.log import get_logger
from tailrace_protos.base import MalformedMessageError
from tailrace_protos.generation import (
    AbortRequest,
    CallErrorCode,
    GenerateRequest,
)

_log = get_logger(__name__)

_Messages = Iterator[GenerateRequest | AbortRequest]


class ServerTransport(Protocol):
    """Carries frames of a server."""

    async def start(self, server: LinkedGenerateServer) -> None:
        """Listen, and give frames to `server.on_frame`."""

    def open(self, peer: Peer, link: WireEvents) -> Wire:
        """A wire back to a client."""

    async def stop(self) -> None:
        """Send what is queued, then stop listening."""


class LinkedGenerateServer:
    """`GenerateServer` over any `ServerTransport`."""

    def __init__(self, transport: ServerTransport, config: ServerChannelConfig) -> None:
        self.transport = transport
        self.config = config
        self.metrics = ChannelMetrics("server")
        self._links: dict[Peer, ServerLink] = {}
        self._sinks: dict[str, CallSink] = {}  # by call id, until the engine's last chunk
        self._num_begun = 0  # since the metrics were last told
        self._num_ended = 0
        self._lingering: list[CallSink] = []
        self._linger_timer: asyncio.TimerHandle | None = None
        self._tick_timer: asyncio.TimerHandle | None = None

    async def start(self, handler: GenerateHandler) -> None:
        """See `GenerateServer.start`."""
        self._handler = handler
        self.loop = asyncio.get_running_loop()
        await self.transport.start(self)
        self._schedule_tick()

    async def stop(self) -> None:
        """See `GenerateServer.stop`."""
        self._flush_lingering()
        for link in list(self._links.values()):
            link.flush()
            self.drop(link, LinkLoss.CLOSED, "the server stops")
        for timer in (self._tick_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        self.count()
        await self.transport.stop()

    def on_frame(self, peer: Peer, data: bytes) -> None:
        """A frame from a client, known or not."""
        self.metrics.frames_in.inc()
        self.metrics.bytes_in.inc(len(data))
        if not peer:
            self.metrics.malformed.inc()
            _log.warning("generation frame without a reply subject", num_bytes=len(data))
            return
        link = self._links.get(peer)
        try:
            frame = read_request_frame(data)
        except MalformedMessageError as error:
            self.metrics.malformed.inc()
            _log.warning("malformed generation frame", peer=str(peer), reason=str(error))
            self._refuse(peer, link, LinkLoss.MALFORMED, str(error))
            return
        if frame.closing:
            if link is not None:
                self.drop(link, LinkLoss.CLOSED, "")
            return
        expected = link.expected_sequence if link is not None else 0
        if frame.sequence != expected:
            detail = f"frame {frame.sequence} came instead of {expected}: calls were lost"
            self._refuse(peer, link, LinkLoss.GAP, detail)
            return
        self._accept(link or self._open(peer), frame, len(data))

    def _open(self, peer: Peer) -> ServerLink:
        link = self._links[peer] = ServerLink(peer, self, self.transport.open)
        return link

    def _refuse(self, peer: Peer, link: ServerLink | None, cause: LinkLoss, detail: str) -> None:
        """End the link and say so, also to somebody who had none (left over from before a restart)."""
        self.drop(link or self._open(peer), cause, detail)

    def _accept(
        self, link: ServerLink, frame: Envelope[GenerateRequest | AbortRequest], num_bytes: int
    ) -> None:
        link.take(num_bytes, frame.received)
        for bad in frame.bad:
            self.metrics.malformed.inc()
            _log.warning("malformed generation request", call_id=bad.call_id, reason=bad.reason)
            if bad.call_id:
                self._answer_error(link, bad.call_id, CallErrorCode.INVALID, bad.reason)
            else:  # some caller would wait for an answer that nobody can address
                self.drop(link, LinkLoss.MALFORMED, bad.reason)
        if not link.is_open:
            return
        if frame.messages:
            self._dispatch(link, iter(frame.messages))
            link.confirm()
        elif not frame.bad:
            link.answer()

    def _dispatch(self, link: ServerLink, messages: _Messages) -> None:
        """Hand messages to the handler; one that makes it raise fails alone."""
        for message in messages:
            if not link.is_open:
                return  # nobody waits for an answer
            handled = False
            try:
                if isinstance(message, GenerateRequest):
                    self._begin(link, message)
                else:
                    self._abort(link, message.call_ids)
                handled = True
            finally:
                if not handled:
                    self._fail_unhandled(link, message)
                    self.loop.call_soon(self._dispatch, link, messages)

    def _fail_unhandled(self, link: ServerLink, message: GenerateRequest | AbortRequest) -> None:
        sink = link.calls.get(message.call_id) if isinstance(message, GenerateRequest) else None
        if sink is not None:
            sink.fail(CallErrorCode.INTERNAL, "the server could not begin this call; its log says why")

    def _begin(self, link: ServerLink, request: GenerateRequest) -> None:
        call_id = request.call_id
        refusal = self._refusal(link, request)
        if refusal is not None:
            code, reason = refusal
            if reason:
                self._answer_error(link, call_id, code, reason)
            return
        sink = CallSink(call_id, link, self.config.chunk_tokens)
        self._sinks[call_id] = sink
        link.calls[call_id] = sink
        self._num_begun += 1
        self._handler.submit(request, sink)

    def _refusal(self, link: ServerLink, request: GenerateRequest) -> tuple[CallErrorCode, str] | None:
        """Why a request is not taken; an empty reason: it is being answered already."""
        running = self._sinks.get(request.call_id)
        if running is not None:
            self.metrics.refused("duplicate")
            if link.calls.get(request.call_id) is running:
                return CallErrorCode.OVERLOADED, ""
            return CallErrorCode.OVERLOADED, f"call {request.call_id} is still running on this server"
        if len(self._sinks) >= self.config.max_server_calls:
            self.metrics.refused("full")
            return CallErrorCode.OVERLOADED, f"{len(self._sinks)} calls are in flight on this server"
        if len(request.prompt_ids) & 3:
            self.metrics.refused("invalid")
            reason = f"prompt_ids has {len(request.prompt_ids)} bytes: not int32 values"
            return CallErrorCode.INVALID, reason
        return None

    def _answer_error(self, link: ServerLink, call_id: str, code: CallErrorCode, reason: str) -> None:
        retry_after_s = self.config.keepalive_s if code is CallErrorCode.OVERLOADED else 0.0
        CallSink(call_id, link, self.config.chunk_tokens).fail(code, reason, retry_after_s)

    def _abort(self, link: ServerLink, call_ids: tuple[str, ...]) -> None:
        for call_id in call_ids:
            if call_id in link.calls:
                self._handler.abort(call_id)

    def on_done(self, sink: CallSink) -> None:
        """The engine's last chunk of a call: its id is free."""
        if self._sinks.get(sink.call_id) is sink:
            del self._sinks[sink.call_id]
            self._num_ended += 1

    def count(self) -> None:
        """Tell the metrics what began and ended: once a frame, not once a call."""
        begun, ended = self._num_begun, self._num_ended
        self._num_begun = self._num_ended = 0
        if begun:
            self.metrics.calls.inc(begun)
        if ended:
            self.metrics.finished.inc(ended)
        if begun != ended:
            self.metrics.in_flight.inc(begun - ended)

    def drop(self, link: ServerLink, cause: LinkLoss, detail: str) -> None:
        """End a link and abort its calls."""
        if not link.is_open:
            return
        self._links.pop(link.peer, None)
        self.metrics.link_lost(cause.value)
        link.shut("" if cause is LinkLoss.CLOSED and not detail else f"{cause.value}: {detail}")
        if link.calls:
            _log.warning(
                "generation client gone", peer=str(link.peer), cause=cause.value, detail=detail,
                num_calls=len(link.calls),
            )  # fmt: skip
        self._abort_all(iter(list(link.calls.values())))

    def _abort_all(self, sinks: Iterator[CallSink]) -> None:
        for sink in sinks:
            handled = False
            sink.muted = True
            try:
                self._handler.abort(sink.call_id)
                handled = True
            finally:
                if not handled:
                    self.loop.call_soon(self._abort_all, sinks)

    def linger(self, sink: CallSink) -> None:
        """Flush this call when the stream interval is over."""
        self._lingering.append(sink)
        if self._linger_timer is None:
            self._linger_timer = self.loop.call_later(
                self.config.stream_interval_ms / 1000.0, self._on_linger_timer
            )

    def _on_linger_timer(self) -> None:
        self._linger_timer = None
        self._flush_lingering()

    def _flush_lingering(self) -> None:
        lingering, self._lingering = self._lingering, []
        for sink in lingering:
            sink.on_interval()

    def _schedule_tick(self) -> None:
        self._tick_timer = self.loop.call_later(self.config.keepalive_s, self._tick)

    def _tick(self) -> None:
        self._schedule_tick()
        self.count()
        max_ticks = self.config.ticks(self.config.silence_s)
        for link in list(self._links.values()):
            link.silent_ticks += 1
            if link.silent_ticks > max_ticks:
                self.drop(link, LinkLoss.SILENT, f"nothing heard for {self.config.silence_s:g} s")
