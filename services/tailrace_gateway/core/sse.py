"""Server-sent events as bytes."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec

from tailrace_gateway.core.call import CallStart, Completion, Piece, ReplyChoice
from tailrace_gateway.core.errors import ApiError

_encoder = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"


def to_json(value: Any) -> bytes:
    """Compact JSON."""
    return _encoder.encode(value)


def data_event(value: Any) -> bytes:
    """An event without a name."""
    return b"data: " + to_json(value) + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """An event whose name is the value's `type`."""
    return b"event: " + str(value["type"]).encode() + b"\ndata: " + to_json(value) + b"\n\n"


class StreamDialect(Protocol):
    """How one dialect tells a reply while it is being sampled; every method returns events."""

    def begin(self, opening: CallStart) -> bytes:
        """The call was accepted."""

    def piece(self, piece: Piece) -> bytes:
        """New text."""

    def choice(self, choice: ReplyChoice) -> bytes:
        """A choice is complete: tool calls and why it ended."""

    def end(self, completion: Completion) -> bytes:
        """All is said."""

    def error(self, error: ApiError) -> bytes:
        """The call failed after its beginning."""
