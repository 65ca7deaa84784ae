"""Server-sent events as bytes."""

from typing import Any, Protocol

import msgspec

from tailrace_gateway.core.call import CallStart, Completion, Piece, ReplyChoice
from tailrace_gateway.core.errors import ApiError

_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """Encode as compact JSON."""
    return _encoder.encode(value)


def data_event(value: Any) -> bytes:
    """Encode an event without a name."""
    return b"data: " + to_json(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """Encode an event named by the value's `type`."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + to_json(value) + b"\n\n"


class StreamDialect(Protocol):
    """Stream format of one dialect; each method returns encoded events."""

    def begin(self, opening: CallStart) -> bytes:
        """Encode the start of the call."""

    def piece(self, piece: Piece) -> bytes:
        """Encode new text."""

    def choice(self, choice: ReplyChoice) -> bytes:
        """Encode the end of a choice: its tool calls and its stop reason."""

    def end(self, completion: Completion) -> bytes:
        """Encode the end of the stream."""

    def error(self, error: ApiError) -> bytes:
        """Encode a failure after the start."""
