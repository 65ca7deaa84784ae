"""Interfaces of the channel: of its client and engine, and of its two transports."""

import enum
from typing import NamedTuple, Protocol

from tailrace.channel.call import GenerateCall
from tailrace_protos.control import source_of
from tailrace_protos.episode import Lease
from tailrace_protos.generation import GenerateRequest, TokenChunk


class Address(NamedTuple):
    """Address of an inference server."""

    server_id: str
    nats_subject: str = ""
    zmq_endpoint: str = ""
    zmq_public_key: str = ""
    incarnation: str = ""

    @classmethod
    def of(cls, lease: Lease) -> "Address":
        """Returns the address in a placement lease."""
        return cls(
            lease.server_id,
            lease.nats_subject,
            lease.zmq_endpoint,
            lease.zmq_public_key,
            lease.incarnation,
        )

    @property
    def source(self) -> str:
        """Source of tokens: the name of the server's process."""
        return source_of(self.server_id, self.incarnation)


class GenerateClient(Protocol):
    """Client of the channel; its calls are made and awaited in one event loop."""

    async def start(self) -> None:
        """Prepares for `generate`."""

    def generate(self, address: Address, request: GenerateRequest) -> GenerateCall:
        """Queues a request; requests to one server in one loop tick share frames.

        Raises `OversizeRequestError`, `DuplicateCallError`, `ChannelFullError`, `NoRouteError` or
        `ChannelClosedError`; the call itself raises later errors.
        """

    def release_prefix(self, address: Address, episode_id: str) -> None:
        """Tells a server that nobody asks for this episode's context again.

        Nothing answers; without a link to the server it does nothing.
        """

    async def close(self) -> None:
        """Fails the calls in flight, and tells the servers to stop them."""


class ChunkSink(Protocol):
    """Receiver of the chunks of one call."""

    def send(self, chunk: TokenChunk) -> None:
        """Sends new tokens; the last chunk has `finish_reason` or `error`, later ones are ignored.

        Called in the event loop (`loop.call_soon_threadsafe` from other threads). The chunks of one
        loop tick become one chunk; an engine coalesces the tokens of several steps itself.
        """


class GenerateHandler(Protocol):
    """Engine behind a server: called in the event loop, must not block."""

    def submit(self, request: GenerateRequest, sink: ChunkSink) -> None:
        """Begins a call; each call sends exactly one last chunk, however it ends.

        Arrays of the request are views into a received frame: copy them to keep them.
        """

    def abort(self, call_id: str) -> None:
        """Ends a call soon, with a last chunk whose finish reason is `abort`."""

    def release_prefixes(self, episode_ids: tuple[str, ...]) -> None:
        """Takes a `ReleasePrefixes`."""


class LinkLoss(enum.StrEnum):
    """Cause of the end of a link."""

    SILENT = "silent"  # no frame for `silence_s`
    GAP = "gap"  # a frame was lost
    MALFORMED = "malformed"  # invalid frame
    NO_RESPONDER = "no_responder"  # no server listens
    DISCONNECTED = "disconnected"  # the peer's end of the socket closed
    HANDSHAKE = "handshake"  # wrong CURVE keys
    BROKEN = "broken"  # the other side ended it
    CLOSED = "closed"  # this side closed it


class Wire(Protocol):
    """One direction of a link over a transport. Frames arrive in order or not at all."""

    max_frame_bytes: int

    def send(self, frame: bytearray) -> None:
        """Sends, or queues while the peer is slow (the link's credit limits it); never drops."""

    def close(self) -> None:
        """Sends queued frames as far as possible, then closes."""


class WireEvents(Protocol):
    """Events of a wire, from the transport to its link."""

    def on_lost(self, cause: LinkLoss, detail: str) -> None:
        """Reports that the peer is gone."""


class LinkEvents(WireEvents, Protocol):
    """Events of a client's wire."""

    def on_frame(self, data: bytes) -> None:
        """Reports a received frame."""
