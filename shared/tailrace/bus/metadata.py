"""What JetStream tells about a delivery, read from its acknowledgement subject."""

from __future__ import annotations

from typing import NamedTuple

_SHORT_TOKENS = (
    9  # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>
)


class DeliveryInfo(NamedTuple):
    """Which message of which stream this is, and how often it was delivered (1 = first time)."""

    stream: str
    num_delivered: int
    stream_seq: int
    stored_ns: int  # when the stream took it: a stream that begins anew counts from 1 again

    @classmethod
    def of(cls, reply: str) -> DeliveryInfo:
        """Parse `$JS.ACK...`; the newer form has a domain and an account hash before the stream."""
        tokens = reply.split(".")
        first = 2 if len(tokens) == _SHORT_TOKENS else 4
        assert len(tokens) >= first + 6, f"not a JetStream delivery: {reply!r}"
        delivered, stream_seq, _, stored_ns = map(int, tokens[first + 2 : first + 6])
        return cls(tokens[first], delivered, stream_seq, stored_ns)
