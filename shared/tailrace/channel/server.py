"""Server of the channel, over any transport.

Invariants: each received request is answered by exactly one last chunk or by the end of its link; a
call id is in use until the engine's last chunk, so an engine never has two calls with one id; no input
of a client can stop the server; the calls of a client that is gone are aborted.
"""

import asyncio
from collections.abc import Iterator
from typing import Protocol

from tailrace.channel.config import ServerChannelConfig
from tailrace.channel.frames import ClientMessage, Envelope, read_request_frame
from tailrace.channel.ports import GenerateHandler, LinkLoss, Wire, WireEvents
from tailrace.channel.server_link import CallSink, Peer, ServerCalls, ServerLink
from tailrace.log import get_logger
from tailrace_protos.base import MalformedMessageError
from tailrace_protos.generation import CallErrorCode, GenerateRequest, ReleasePrefixes

_log = get_logger(__name__)

_Messages = Iterator[ClientMessage]


class ServerTransport(Protocol):
    """Transport of a server's frames."""

    async def start(self, server: "GenerateServer") -> None:
        """Listens, and passes frames to `server.on_frame`."""

    def open(self, peer: Peer, link: WireEvents) -> Wire:
        """Opens a wire to a client."""

    async def stop(self) -> None:
        """Sends queued frames, then stops listening."""


class GenerateServer:
    """One inference server's end of the channel, over any `ServerTransport`."""

    def __init__(self, transport: ServerTransport, config: ServerChannelConfig) -> None:
        self._transport = transport
        self._config = config
        self._calls = ServerCalls()
        self._metrics = self._calls.metrics
        self._links: dict[Peer, ServerLink] = {}
        self._tick_timer: asyncio.TimerHandle | None = None

    async def start(self, handler: GenerateHandler) -> None:
        """Listens; requests go to `handler`."""
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        await self._transport.start(self)
        self._schedule_tick()

    async def stop(self) -> None:
        """Stops listening; the callers of unfinished calls learn it at once."""
        for link in list(self._links.values()):
            link.flush()
            self._drop(link, LinkLoss.CLOSED, "the server stops")
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        self._calls.update_metrics()
        await self._transport.stop()

    def on_frame(self, peer: Peer, data: bytes) -> None:
        """Handles a frame of a client, known or unknown."""
        self._metrics.frames_in.inc()
        self._metrics.bytes_in.inc(len(data))
        if not peer:
            self._metrics.malformed.inc()
            _log.warning("generation frame without a reply subject", num_bytes=len(data))
            return
        link = self._links.get(peer)
        try:
            frame = read_request_frame(data)
        except MalformedMessageError as error:
            self._metrics.malformed.inc()
            _log.warning("malformed generation frame", peer=str(peer), reason=str(error))
            self._refuse(peer, link, LinkLoss.MALFORMED, str(error))
            return
        if frame.closing:
            if link is not None:
                self._drop(link, LinkLoss.CLOSED, "")
            return
        expected = link.expected_sequence if link is not None else 0
        if frame.sequence != expected:
            detail = f"frame {frame.sequence} came instead of {expected}: calls were lost"
            self._refuse(peer, link, LinkLoss.GAP, detail)
            return
        self._accept(link or self._open(peer), frame, len(data))

    def _open(self, peer: Peer) -> ServerLink:
        link = ServerLink(peer, self._config, self._calls, self._transport.open, self._drop)
        self._links[peer] = link
        return link

    def _refuse(self, peer: Peer, link: ServerLink | None, cause: LinkLoss, detail: str) -> None:
        """Ends the link and tells the client, also one whose link is from before a restart."""
        self._drop(link or self._open(peer), cause, detail)

    def _accept(self, link: ServerLink, frame: Envelope[ClientMessage], num_bytes: int) -> None:
        link.take(num_bytes, frame.received)
        for bad in frame.bad:
            self._metrics.malformed.inc()
            _log.warning("malformed generation request", call_id=bad.call_id, reason=bad.reason)
            if bad.call_id:
                self._answer_error(link, bad.call_id, CallErrorCode.INVALID, bad.reason)
            else:  # an answer without a call id cannot be addressed
                self._drop(link, LinkLoss.MALFORMED, bad.reason)
        if not link.is_open:
            return
        if frame.messages:
            self._dispatch(link, iter(frame.messages))
            link.confirm()
        elif not frame.bad:
            link.answer()

    def _dispatch(self, link: ServerLink, messages: _Messages) -> None:
        """Passes messages to the handler; a message that makes it raise fails alone."""
        for message in messages:
            if not link.is_open:
                return  # the client is gone
            handled = False
            try:
                if isinstance(message, GenerateRequest):
                    self._begin(link, message)
                elif isinstance(message, ReleasePrefixes):
                    self._handler.release_prefixes(message.episode_ids)
                else:
                    self._abort(link, message.call_ids)
                handled = True
            finally:
                if not handled:
                    self._fail_unhandled(link, message)
                    self._loop.call_soon(self._dispatch, link, messages)

    def _fail_unhandled(self, link: ServerLink, message: ClientMessage) -> None:
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
        sink = link.calls[call_id] = CallSink(call_id, link)
        self._calls.begin(sink)
        self._handler.submit(request, sink)

    def _refusal(self, link: ServerLink, request: GenerateRequest) -> tuple[CallErrorCode, str] | None:
        """Returns why a request is refused; an empty reason: its answer is already under way."""
        running = self._calls.by_id.get(request.call_id)
        if running is not None:
            self._metrics.refused("duplicate")
            if link.calls.get(request.call_id) is running:
                return CallErrorCode.OVERLOADED, ""
            return CallErrorCode.OVERLOADED, f"call {request.call_id} is still running on this server"
        if len(self._calls.by_id) >= self._config.max_server_calls:
            self._metrics.refused("full")
            return (
                CallErrorCode.OVERLOADED,
                f"{len(self._calls.by_id)} calls are in flight on this server",
            )
        if len(request.prompt_ids) & 3:
            self._metrics.refused("invalid")
            reason = f"prompt_ids has {len(request.prompt_ids)} bytes: not int32 values"
            return CallErrorCode.INVALID, reason
        return None

    def _answer_error(self, link: ServerLink, call_id: str, code: CallErrorCode, reason: str) -> None:
        retry_after_s = self._config.keepalive_s if code is CallErrorCode.OVERLOADED else 0.0
        CallSink(call_id, link).fail(code, reason, retry_after_s)

    def _abort(self, link: ServerLink, call_ids: tuple[str, ...]) -> None:
        for call_id in call_ids:
            if call_id in link.calls:
                self._handler.abort(call_id)

    def _drop(self, link: ServerLink, cause: LinkLoss, detail: str) -> None:
        """Ends a link and aborts its calls."""
        if not link.is_open:
            return
        self._links.pop(link.peer, None)
        self._metrics.link_lost(cause.value)
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
                    self._loop.call_soon(self._abort_all, sinks)

    def _schedule_tick(self) -> None:
        self._tick_timer = self._loop.call_later(self._config.keepalive_s, self._tick)

    def _tick(self) -> None:
        self._schedule_tick()
        self._calls.update_metrics()
        max_ticks = self._config.ticks(self._config.silence_s)
        for link in list(self._links.values()):
            link.silent_ticks += 1
            if link.silent_ticks > max_ticks:
                self._drop(link, LinkLoss.SILENT, f"no frame for {self._config.silence_s:g} s")
