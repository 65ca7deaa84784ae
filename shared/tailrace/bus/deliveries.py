"""Deliveries of JetStream: their metadata, and dead letters in the DEAD stream.

A dead letter is a copy of a message that no worker could handle, with the reason. Invariant: the
original is terminated only after its dead letter is stored.
"""

from typing import NamedTuple

from nats.aio.msg import Msg

from tailrace import metrics
from tailrace.bus.durable import MESSAGE_ID_HEADER, DurablePublisher, Outgoing
from tailrace.bus.errors import OversizedMessageError
from tailrace.log import get_logger

log = get_logger(__name__)

_SHORT_TOKENS = (
    9  # $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>
)
SUBJECT_HEADER = "Tailrace-Dead-Subject"
ERROR_HEADER = "Tailrace-Dead-Error"
REASON_HEADER = "Tailrace-Dead-Reason"
DELIVERIES_HEADER = "Tailrace-Dead-Deliveries"
MAX_REASON_CHARS = 500


class DeliveryInfo(NamedTuple):
    """Metadata of one delivery, read from its acknowledgement subject."""

    stream: str
    num_delivered: int  # 1: first delivery
    stream_seq: int
    stored_ns: int  # time of storage; tells apart equal numbers of a stream that was created again

    @classmethod
    def of(cls, reply: str) -> "DeliveryInfo":
        """Parses `$JS.ACK...`; the newer form has a domain and an account hash before the stream."""
        tokens = reply.split(".")
        first = 2 if len(tokens) == _SHORT_TOKENS else 4
        assert len(tokens) >= first + 6, f"not a JetStream delivery: {reply!r}"
        delivered, stream_seq, _, stored_ns = map(int, tokens[first + 2 : first + 6])
        return cls(tokens[first], delivered, stream_seq, stored_ns)


class DeadLetters:
    """Stores dead letters."""

    def __init__(self, publisher: DurablePublisher) -> None:
        self._publisher = publisher

    async def store(self, message: Msg, subject: str, error: Exception | str) -> None:
        """Stores a copy of `message` under `subject`; the caller then terminates the original."""
        info = DeliveryInfo.of(message.reply)
        kind = type(error).__name__ if isinstance(error, Exception) else "TooManyDeliveries"
        reason = " ".join(str(error).split())[:MAX_REASON_CHARS]
        log.error(
            "dead letter", subject=message.subject, seq=info.stream_seq, error=kind, reason=reason
        )
        metrics.DEAD_LETTERS.labels(subject).inc()
        headers = {
            MESSAGE_ID_HEADER: f"dead.{info.stream}.{info.stream_seq}",
            SUBJECT_HEADER: message.subject,
            ERROR_HEADER: kind,
            REASON_HEADER: reason,
            DELIVERIES_HEADER: str(info.num_delivered),
        }
        try:
            await self._publisher.publish([Outgoing(subject, message.data, headers)])
        except OversizedMessageError:  # the message fits, the message with the reason does not
            await self._publisher.publish(
                [Outgoing(subject, b"", {**headers, "Tailrace-Dead-Payload": "cut"})]
            )
