"""Durable publishes: pipelined, acknowledged by JetStream, and safe to repeat by message id.

Invariants: a publish returns only after its stream has stored the message; while nats-server is away or
the stream is full it waits (counted by reason) and drops nothing; a repeated publish has the same
`Nats-Msg-Id`, so the stream stores it once within its window; a message that no worker could handle is
terminated only after its copy, the dead letter, is stored in the DEAD stream.
"""

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NamedTuple

import msgspec
from nats.aio.msg import Msg

from tailrace import metrics
from tailrace.bus.calls import ReplyInbox, header_text, is_no_responders
from tailrace.bus.connection import Connection, Headers
from tailrace.bus.errors import OversizedMessageError, PublishRefusedError, StreamMissingError
from tailrace.log import get_logger
from tailrace.retry import Backoff

log = get_logger(__name__)

MESSAGE_ID_HEADER = "Nats-Msg-Id"
WINDOW = 512  # maximum number of publishes in flight
ACK_TIMEOUT_S = 5.0
MISSING_AFTER_S = 60.0  # longest time without the stream (start, restart) before an error
STORE_FAILED = 10077  # JetStream's code for a full stream, and for a failing disk
LOG_EVERY = 20  # retries of one batch between two warnings


class Outgoing(NamedTuple):
    """Message for the stream that listens on `subject`."""

    subject: str
    payload: bytes
    headers: Headers


class _ApiError(msgspec.Struct):
    code: int
    err_code: int = 0
    description: str = ""


class _PubAck(msgspec.Struct):
    error: _ApiError | None = None


_ack_decoder = msgspec.json.Decoder(_PubAck)


class DurablePublisher:
    """Publishes into streams."""

    def __init__(
        self, connection: Connection, inbox: ReplyInbox, *, missing_after_s: float = MISSING_AFTER_S
    ) -> None:
        self._missing_after_s = missing_after_s
        self._connection = connection
        self._inbox = inbox
        self._awaited: set[asyncio.Future[Msg]] = set()
        connection.on_lost.append(self._on_lost)

    async def publish(self, items: Sequence[Outgoing]) -> None:
        """Returns once all items are stored. Repeated items may be stored out of order."""
        for item in items:
            self._connection.check_size(item.subject, item.payload, item.headers)
        for start in range(0, len(items), WINDOW):
            await self._publish_window(items[start : start + WINDOW])

    async def _publish_window(self, items: Sequence[Outgoing]) -> None:
        backoff = Backoff(0.05, 2.0)
        missing_since_s: float | None = None
        while left := await self._round(items):
            reasons = {reason for _, reason in left}
            now_s = asyncio.get_running_loop().time()
            missing_since_s = (missing_since_s or now_s) if "missing" in reasons else None
            if missing_since_s is not None and now_s - missing_since_s > self._missing_after_s:
                subject = next(item.subject for item, reason in left if reason == "missing")
                raise StreamMissingError(subject, self._missing_after_s)
            _count_retries(left, is_logged=backoff.num_failures % LOG_EVERY == 0)
            items = [item for item, _ in left]
            await backoff.sleep()

    async def _round(self, items: Sequence[Outgoing]) -> list[tuple[Outgoing, str]]:
        """Sends all items and awaits their acknowledgements; returns items to repeat, with reasons."""
        with ExitStack() as stack:
            acks: list[asyncio.Future[Msg]] = []
            try:
                for item in items:
                    inbox, ack = stack.enter_context(self._inbox.expect())
                    acks.append(ack)
                    self._awaited.add(ack)
                    await self._connection.publish(
                        item.subject, item.payload, reply=inbox, headers=item.headers
                    )
                metrics.BUS_UNACKED_PUBLISHES.set(len(self._awaited))
                await asyncio.wait(acks, timeout=ACK_TIMEOUT_S)
            finally:
                self._awaited.difference_update(acks)
                metrics.BUS_UNACKED_PUBLISHES.set(len(self._awaited))
            outcomes = [
                (item, _reason_to_repeat(item, ack)) for item, ack in zip(items, acks, strict=True)
            ]
            return [(item, reason) for item, reason in outcomes if reason]

    def _on_lost(self) -> None:
        """Ends the waits: the new connection receives no PubAck for messages of the old one."""
        for ack in self._awaited:
            ack.cancel()


def _count_retries(left: Sequence[tuple[Outgoing, str]], *, is_logged: bool) -> None:
    for _, reason in left:
        metrics.BUS_PUBLISH_RETRIES.labels(reason.split(":")[0]).inc()
    if is_logged:
        reasons = sorted({reason for _, reason in left})
        log.warning("publish waits", subject=left[0][0].subject, reasons=reasons, num=len(left))


def _reason_to_repeat(item: Outgoing, ack: asyncio.Future[Msg]) -> str:
    """Returns the reason, empty when stored; `PublishRefusedError` when a retry cannot help."""
    if not ack.done() or ack.cancelled():
        return "lost"
    message = ack.result()
    if is_no_responders(message):
        return "missing"
    error = _ack_decoder.decode(message.data).error
    if error is None:
        return ""
    if error.err_code == STORE_FAILED and "maximum" in error.description:
        return "full"
    if error.code >= 500:
        return f"unavailable: {error.description}"
    raise PublishRefusedError(item.subject, error.code, error.err_code, error.description)


# Of $JS.ACK.<stream>.<consumer>.<delivered>.<stream seq>.<consumer seq>.<time>.<pending>
_SHORT_TOKENS = 9
SUBJECT_HEADER = "Tailrace-Dead-Subject"
ERROR_HEADER = "Tailrace-Dead-Error"
REASON_HEADER = "Tailrace-Dead-Reason"
DELIVERIES_HEADER = "Tailrace-Dead-Deliveries"


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
        reason = header_text(str(error))
        log.error(
            "dead letter", subject=message.subject, seq=info.stream_seq, error=kind, reason=reason
        )
        metrics.DEAD_LETTERS.labels(subject).inc()
        headers = {
            MESSAGE_ID_HEADER: f"dead.{info.stream}.{info.stream_seq}.{info.stored_ns}",
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
