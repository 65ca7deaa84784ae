"""Settlement of a pulled message: acknowledge, retry, hand back, or store as a dead letter.

Invariants: each message is settled exactly once; a hand-back never makes a message a dead letter; a
message is terminated only after its copy is stored.
"""

import asyncio
from dataclasses import dataclass, field

import msgspec
from nats.aio.msg import Msg

from tailrace import tracing
from tailrace.bus.bus import Bus

ACK = b"+ACK"
IN_PROGRESS = b"+WPI"
TERMINATE = b"+TERM"
RETRY_FIRST_S = 0.5
RETRY_MAX_S = 30.0


@dataclass
class Delivery:
    """Delivery of a message, as its handler sees it."""

    subject: str
    stream_seq: int
    stored_ns: int  # time of storage in the stream
    num_delivered: int  # 1: first delivery
    message_id: str  # the publisher's Nats-Msg-Id
    reply: str = field(repr=False)  # acknowledgement subject; a redelivery replaces it


class Settlement:
    """Settlement of the messages of one consumer."""

    def __init__(self, bus: Bus, max_deliveries: int, dead_subject: str) -> None:
        self._bus = bus
        self._max_deliveries = max_deliveries
        self._dead_subject = dead_subject

    async def ack(self, delivery: Delivery) -> None:
        """Acknowledges without confirmation: a lost acknowledgement costs one more delivery."""
        await self._bus.connection.publish(delivery.reply, ACK)

    async def heartbeat(self, delivery: Delivery) -> None:
        """Extends the ack wait of a message in progress."""
        await self._bus.connection.publish(delivery.reply, IN_PROGRESS)

    async def retry(self, delivery: Delivery) -> None:
        """Requests a redelivery, with a delay that grows with each delivery."""
        await self._nak(delivery, min(RETRY_FIRST_S * 2.0 ** (delivery.num_delivered - 1), RETRY_MAX_S))

    async def dead_letter(self, message: Msg, delivery: Delivery, reason: Exception | str) -> None:
        """Stores a dead letter with the reason, then ends the deliveries of the message."""
        await self._bus.dead_letters.store(message, self._dead_subject, reason)
        await self._bus.connection.publish(delivery.reply, TERMINATE)

    async def hand_back(self, message: Msg, delivery: Delivery, delay_s: float) -> None:
        """Returns the message to its queue, for any worker after `delay_s`.

        The server counts this delivery like a failed one. At the limit of deliveries, a new copy
        replaces the message, so that it does not become a dead letter. It waits for a full queue.
        """
        if delivery.num_delivered < self._max_deliveries:
            await self._nak(delivery, delay_s)
            return
        await asyncio.sleep(delay_s)
        await self._bus.publish_copy(
            delivery.subject,
            message.data,
            f"{delivery.message_id}.{delivery.stream_seq}",
            (message.headers or {}).get(tracing.HEADER, ""),
        )
        await self._bus.connection.publish(delivery.reply, TERMINATE)

    async def _nak(self, delivery: Delivery, delay_s: float) -> None:
        body = b"-NAK " + msgspec.json.encode({"delay": int(delay_s * 1e9)}) if delay_s > 0 else b"-NAK"
        await self._bus.connection.publish(delivery.reply, body)
