"""What the channel offers to services, and what its two transports offer to the channel."""

from __future__ import annotations

import enum
from typing import NamedTuple, Protocol

from tailrace.channel.call import GenerateCall
from tailrace_protos.control import Lease, source_of
from tailrace_protos.generation import GenerateRequest, TokenChunk


class Address(NamedTuple):
    """Where an inference server listens."""

    server_id: str
    nats_subject: str = ""
    zmq_endpoint: str = ""
    zmq_public_key: str = ""
    incarnation: str = ""

    @classmethod
    def of(cls, lease: Lease) -> Address:
        """The address in a placement lease."""
        return cls(
            lease.server_id,
            lease.nats_subject,
            lease.zmq_endpoint,
            lease.zmq_public_key,
            lease.incarnation,
        )

    @property
    def source(self) -> str:
        """Names the server's process in the provenance of tokens."""
        return source_of(self.server_id, self.incarnation)


class GenerateClient(Protocol):
    """The callers' side. Belongs to one event loop; calls are made and awaited in it."""

    async def start(self) -> None:
        """Be ready for `generate`."""

    def generate(self, address: Address, request: GenerateRequest) -> GenerateCall:
        """Queue a request; requests to one server made in the same loop tick share frames.

        Raises `OversizeRequestError`, `DuplicateCallError`, `ChannelFullError`, `NoRouteError` or
        `ChannelClosedError`; whatever happens later is raised by the call.
        """

    async def close(self) -> None:
        """Tell the servers to stop what is in flight and fail those calls here."""


class ChunkSink(Protocol):
    """Where the chunks of one call go."""

    def send(self, chunk: TokenChunk) -> None:
        """Pass on new tokens; the last chunk has `finish_reason` or `error`, later ones are ignored.

        Called in the event loop (`loop.call_soon_threadsafe` from other threads). Single tokens are
        welcome: they are merged until `chunk_tokens` or `stream_interval_ms`.
        """


class GenerateHandler(Protocol):
    """The engine's side: called in the event loop, must not block."""

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        """Begin a call; every call gets exactly one last chunk, however it ends.

        Arrays of the request are views into a received frame: copy what is kept for long.
        """

    def abort(self, call_id: str) -> None:
        """End a call soon, with a last chunk whose finish reason is `abort`."""


class GenerateServer(Protocol):
    """One inference server's end of the channel."""

    async def start(self, handler: GenerateHandler) -> None:
        """Listen."""

    async def stop(self) -> None:
        """Stop listening; callers with unfinished calls are told at once."""


class LinkLoss(enum.StrEnum):
    """Why a link was given up."""

    SILENT = "silent"  # nothing heard for `silence_s`
    GAP = "gap"  # a frame was lost
    MALFORMED = "malformed"  # bytes that are no frame
    NO_RESPONDER = "no_responder"  # nobody listens there
    DISCONNECTED = "disconnected"  # the peer's end of the socket closed
    HANDSHAKE = "handshake"  # CURVE keys do not fit
    BROKEN = "broken"  # the other side gave it up
    CLOSED = "closed"  # this side was closed


class Wire(Protocol):
    """One direction of a link, made by a transport. Frames arrive in order or not at all."""

    max_frame_bytes: int

    def send(self, frame: bytearray) -> None:
        """Send, or queue while the peer is slow (a link's credit bounds that); never drops."""

    def close(self) -> None:
        """Send what is queued as far as possible and forget the peer."""


class WireEvents(Protocol):
    """What a transport tells a link about its wire."""

    def on_lost(self, cause: LinkLoss, detail: str) -> None:
        """The transport knows that the peer is gone."""


class LinkEvents(WireEvents, Protocol):
    """What a transport tells a client's link."""

    def on_frame(self, data: bytes) -> None:
        """A frame came."""
