"""Pulling actor: pulls messages of a JetStream consumer and runs a handler for each.

Invariants: at most `max_in_flight` handlers run, and it requests no more messages; one task sends
`in_progress` for all messages in flight, so that NATS does not redeliver them; a message that runs
here, or was acknowledged here recently, never starts a second time; a message is acknowledged only
after its handler returned; a drain settles all messages; one that another worker has is not settled.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nats.aio.msg import Msg

from tailrace import metrics, tracing
from tailrace.bus.bus import Bus
from tailrace.bus.durable import MESSAGE_ID_HEADER, DeliveryInfo
from tailrace.bus.errors import BusClosedError
from tailrace.bus.feed import PullFeed
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.runtime.guard import Failure, Guard, HandBack, LeftToAnother, cancel, finish
from tailrace.runtime.settlement import Delivery, Settlement
from tailrace_protos.base import MalformedMessageError, decode

log = get_logger(__name__)

ASK_PAUSE_S = 0.002  # handlers that end within this time share one request
ASK_AT_LEAST_EVERY_S = 1.0  # detects requests that the server lost
MAX_REMEMBERED = 1024  # acknowledged messages that may be under redelivery
HAND_BACK_TIMEOUT_S = 3.0  # while nats-server is away or the queue full; then the ack wait returns it

M = TypeVar("M")
_Place = tuple[int, int]  # sequence and time: a stream that was created again has the same sequences


@dataclass(frozen=True)
class PullSpec(Generic[M]):
    """Declaration of one pull."""

    stream: str
    durable: str
    message_type: type[M]
    handler: Callable[[M, Delivery], Awaitable[None]]
    max_in_flight: int
    ack_wait_s: float
    max_deliveries: int
    dead_subject: str


class PullActor(Generic[M]):
    """Pulls, runs and settles the messages of one consumer, with heartbeats."""

    def __init__(self, spec: PullSpec[M], bus: Bus, guard: Guard) -> None:
        self.where = f"pull:{spec.stream}/{spec.durable}"
        self._spec = spec
        self._bus = bus
        self._guard = guard
        self._settlement = Settlement(bus, spec.max_deliveries, spec.dead_subject)
        self._in_flight: dict[_Place, Delivery] = {}  # queued ones included
        self._acknowledged: dict[_Place, None] = {}  # oldest first
        self._queued: deque[tuple[Msg, Delivery]] = deque()
        self._running: set[asyncio.Task[None]] = set()
        self._maintenance: list[asyncio.Task[None]] = []
        self._has_room = asyncio.Event()
        self._feed = PullFeed(
            bus.connection, spec.stream, spec.durable, self._on_message, self._has_room.set
        )
        self._beat_now = asyncio.Event()
        self._draining = False
        self._seconds = metrics.HANDLER_SECONDS.labels(self.where)
        metrics.MAILBOX_MESSAGES.labels(self.where).set_function(lambda: len(self._queued))
        metrics.RUNNING_HANDLERS.labels(self.where).set_function(lambda: len(self._running))

    # Life

    async def start(self) -> None:
        """Starts to pull."""
        await self._feed.open()
        self._bus.connection.on_restored.append(self._on_restored)
        for work in (self._keep_asking, self._keep_beating):
            self._maintenance.append(asyncio.create_task(self._maintain(work), name=self.where))
        self._has_room.set()

    async def drain(self, hurry: asyncio.Event) -> None:
        """Pulls no more, lets handlers finish until `hurry` is set, and hands the rest back."""
        self._draining = True
        await self._guard.run(self.where, self._feed.close())
        await asyncio.gather(*(self._return(*queued) for queued in self._queued))
        self._queued.clear()
        await finish(self._running, hurry)
        await cancel(self._maintenance)

    async def _maintain(self, work: Callable[[], Awaitable[None]]) -> None:
        """Begins again after a failure: else this worker pulls no more, or loses what it plays."""
        backoff = Backoff(0.2, 1.0)
        while isinstance(await self._guard.run(self.where, work()), Failure):
            await backoff.sleep()

    def _on_restored(self) -> None:
        self._has_room.set()
        self._beat_now.set()

    # Intake

    async def _keep_asking(self) -> None:
        while not self._draining:
            await _wait(self._has_room, ASK_AT_LEAST_EVERY_S)
            await asyncio.sleep(ASK_PAUSE_S)
            self._has_room.clear()
            await self._feed.ask(self._spec.max_in_flight - len(self._in_flight))

    async def _keep_beating(self) -> None:
        while True:
            await _wait(self._beat_now, self._spec.ack_wait_s / 3)
            self._beat_now.clear()
            if self._bus.connection.is_connected:
                for delivery in list(self._in_flight.values()):
                    await self._settlement.heartbeat(delivery)

    def _on_message(self, message: Msg) -> None:
        info = DeliveryInfo.of(message.reply)
        known = self._in_flight.get((info.stream_seq, info.stored_ns))
        if known is not None:
            known.reply, known.num_delivered = message.reply, info.num_delivered
            return
        message_id = message.headers.get(MESSAGE_ID_HEADER, "") if message.headers else ""
        delivery = Delivery(
            message.subject,
            info.stream_seq,
            info.stored_ns,
            info.num_delivered,
            message_id,
            message.reply,
        )
        self._in_flight[_place_of(delivery)] = delivery
        if self._draining or len(self._running) >= self._spec.max_in_flight:
            self._queued.append((message, delivery))
        else:
            self._run(message, delivery)

    def _run(self, message: Msg, delivery: Delivery) -> None:
        task = asyncio.create_task(self._work(message, delivery), name=self.where)
        self._running.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if self._queued and not self._draining:
            self._run(*self._queued.popleft())
        self._has_room.set()

    # Work

    async def _work(self, message: Msg, delivery: Delivery) -> None:
        started_s = time.perf_counter()
        try:
            outcome = await self._guard.run(self.where, self._handle(message, delivery))
        except asyncio.CancelledError:
            await self._return(message, delivery)
            return
        finally:
            self._in_flight.pop(_place_of(delivery), None)
        self._seconds.observe(time.perf_counter() - started_s)
        metrics.HANDLED.labels(self.where, "failed" if isinstance(outcome, Failure) else outcome).inc()

    async def _handle(self, message: Msg, delivery: Delivery) -> str:
        """Runs the handler and settles the message; returns the name of the outcome."""
        spec = self._spec
        if _place_of(delivery) in self._acknowledged:
            await self._settlement.ack(delivery)
            return "repeated"
        if delivery.num_delivered > spec.max_deliveries:
            reason = f"delivered {delivery.num_delivered} times, {spec.max_deliveries} allowed"
            await self._settlement.dead_letter(message, delivery, reason)
            return "dead"
        try:
            decoded = decode(message.data, spec.message_type)
        except MalformedMessageError as error:
            await self._settlement.dead_letter(message, delivery, error)
            return "malformed"
        traceparent = message.headers.get(tracing.HEADER, "") if message.headers else ""
        try:
            with tracing.carried(traceparent):
                result = await self._call(spec.handler(decoded, delivery))
        except HandBack as order:
            await self._settlement.hand_back(message, delivery, order.delay_s)
            return "handed_back"
        except LeftToAnother:
            return "left"
        if not isinstance(result, Failure):
            await self._settlement.ack(delivery)
            self._remember(delivery)
            return "ok"
        if delivery.num_delivered >= spec.max_deliveries:
            await self._settlement.dead_letter(
                message, delivery, f"{result.error_type}: {result.reason}"
            )
            return "dead"
        await self._settlement.retry(delivery)
        return "failed"

    async def _call(self, work: Awaitable[None]) -> Failure | None:
        """Runs a handler; one that cancels its own task fails, as only a drain cancels handlers."""
        try:
            return await self._guard.run(self.where, work, expected=(HandBack, LeftToAnother))
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if self._draining or task is None:
                raise
            while task.uncancel():
                pass
            return self._guard.record(self.where, error)

    def _remember(self, delivery: Delivery) -> None:
        self._acknowledged[_place_of(delivery)] = None
        if len(self._acknowledged) > MAX_REMEMBERED:
            del self._acknowledged[next(iter(self._acknowledged))]

    async def _return(self, message: Msg, delivery: Delivery) -> None:
        """Hands a message back because this process ends."""
        metrics.HANDLED.labels(self.where, "handed_back").inc()
        self._in_flight.pop(_place_of(delivery), None)
        try:
            async with asyncio.timeout(HAND_BACK_TIMEOUT_S):
                await self._settlement.hand_back(message, delivery, 0.0)
        except (TimeoutError, BusClosedError) as error:
            log.warning(
                "not handed back: nats is away, or the queue full",
                subject=delivery.subject,
                seq=delivery.stream_seq,
                error=str(error),
            )


def _place_of(delivery: Delivery) -> _Place:
    return delivery.stream_seq, delivery.stored_ns


async def _wait(event: asyncio.Event, timeout_s: float) -> None:
    """Returns when the event is set, or after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        return
