"""Listening actor: a core NATS subscription, handled in order, one message at a time.

Core NATS cannot slow a publisher, so waiting messages stay in the client's buffer. Above `mailbox`
waiting messages the actor logs that it falls behind. The client drops messages only at its own limit
(about a million messages or 512 MiB), counts them and logs an error.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription

from tailrace import metrics, tracing
from tailrace.bus.bus import Bus
from tailrace.log import get_logger
from tailrace.runtime.guard import Failure, Guard, finish
from tailrace_protos.base import MalformedMessageError, decode

log = get_logger(__name__)

M = TypeVar("M")


@dataclass
class SubscriptionActor(Generic[M]):
    """Handler of the messages of one subject."""

    subject: str
    message_type: type[M]
    handler: Callable[[M], Awaitable[None]]
    mailbox: int
    bus: Bus
    guard: Guard

    def __post_init__(self) -> None:
        self.where = f"subscribe:{self.subject}"
        self._subscription: Subscription | None = None
        self._is_behind = False
        self._outcomes = {
            outcome: metrics.HANDLED.labels(self.where, outcome)
            for outcome in ("ok", "failed", "malformed")
        }
        self._seconds = metrics.HANDLER_SECONDS.labels(self.where)
        metrics.MAILBOX_MESSAGES.labels(self.where).set_function(self._num_waiting)

    async def start(self) -> None:
        """Subscribes."""
        self._subscription = await self.bus.connection.subscribe(self.subject, self._on_message)

    async def drain(self, hurry: asyncio.Event) -> None:
        """Unsubscribes; returns once received messages are handled, or once `hurry` is set."""
        if self._subscription is not None:
            draining = self.guard.run(self.where, self.bus.connection.drain(self._subscription))
            await finish([asyncio.create_task(draining, name=self.where)], hurry)

    def _num_waiting(self) -> int:
        return self._subscription.pending_msgs if self._subscription is not None else 0

    async def _on_message(self, message: Msg) -> None:
        self._watch_depth()
        started_s = time.perf_counter()
        outcome = await self._handle(message)
        self._outcomes[outcome].inc()
        self._seconds.observe(time.perf_counter() - started_s)

    async def _handle(self, message: Msg) -> str:
        try:
            decoded = decode(message.data, self.message_type)
        except MalformedMessageError as error:
            log.error("malformed message skipped", subject=message.subject, reason=str(error))
            return "malformed"
        traceparent = message.headers.get(tracing.HEADER, "") if message.headers else ""
        with tracing.span(self.subject, traceparent):
            result = await self.guard.run(self.where, self.handler(decoded))
        return "failed" if isinstance(result, Failure) else "ok"

    def _watch_depth(self) -> None:
        is_behind = self._num_waiting() > self.mailbox
        if is_behind and not self._is_behind:
            log.warning("falling behind", subject=self.subject, num_waiting=self._num_waiting())
        self._is_behind = is_behind
