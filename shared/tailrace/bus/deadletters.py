"""Dead letters: messages that nobody could handle, kept with the reason in the DEAD stream.

Invariant: the original is terminated only after the dead letter has been stored.
"""

from __future__ import annotations

from nats.aio.msg import Msg

from tailrace import metrics
from tailrace.bus.durable import MESSAGE_ID_HEADER, DurablePublisher, Outgoing
from tailrace.bus.errors import OversizedMessageError
from tailrace.bus.metadata import DeliveryInfo
from tailrace.log import get_logger

log = get_logger(__name__)

SUBJECT_HEADER = "Tailrace-Dead-Subject"
ERROR_HEADER = "Tailrace-Dead-Error"
REASON_HEADER = "Tailrace-Dead-Reason"
DELIVERIES_HEADER = "Tailrace-Dead-Deliveries"
MAX_REASON_CHARS = 500


class DeadLetters:
    """Stores dead letters."""

    def __init__(self, publisher: DurablePublisher) -> None:
        self._publisher = publisher

    async def bury(self, message: Msg, subject: str, error: Exception | str) -> None:
        """Return once a copy of `message` is stored under `subject`; the caller then terminates it."""
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
        except OversizedMessageError:  # the original fitted exactly; with the reason it does not
            await self._publisher.publish(
                [Outgoing(subject, b"", {**headers, "Tailrace-Dead-Payload": "cut"})]
            )
