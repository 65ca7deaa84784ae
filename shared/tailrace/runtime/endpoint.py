"""Callable actor: a NATS micro endpoint with a bounded mailbox.

nats-py awaits an endpoint's callback before it reads the next request. The callback therefore only
queues the request, or answers 503 with `Retry-After`. Invariants: at most `concurrency` handlers run;
at most `mailbox` requests wait; each accepted request gets one answer, also when the handler fails
(500), a drain cancels it (503) or the payload is malformed (400).
"""

import asyncio
import re
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from nats.micro.request import Request
from nats.micro.service import Service as MicroService

from tailrace import metrics, tracing
from tailrace.bus.bus import Bus
from tailrace.bus.calls import error_headers
from tailrace.bus.errors import CallFailedError, OversizedMessageError
from tailrace.log import get_logger
from tailrace.runtime.guard import Failure, Guard, finish
from tailrace_protos.base import MalformedMessageError, Message, decode, encode
from tailrace_protos.generation import CallErrorCode

log = get_logger(__name__)

Q = TypeVar("Q", bound=Message)

RETRY_AFTER_MIN_S = 0.05
RETRY_AFTER_MAX_S = 5.0


@dataclass
class EndpointStats:
    """Statistics of an endpoint in `$SRV.STATS`, beside the counts of nats-py."""

    num_ok: int = 0
    num_failed: int = 0
    num_malformed: int = 0
    num_rejected: int = 0
    mean_handler_s: float = 0.0  # exponential mean; basis of `Retry-After`


@dataclass(frozen=True)
class EndpointSpec(Generic[Q]):
    """Declaration of one endpoint."""

    subject: str
    request_type: type[Q]
    handler: Callable[[Q], Awaitable[Message]]
    queue: str
    mailbox: int
    concurrency: int


@dataclass
class EndpointActor(Generic[Q]):
    """Accepts, queues, runs and answers the requests of one subject."""

    spec: EndpointSpec[Q]
    bus: Bus
    guard: Guard
    stats: EndpointStats = field(default_factory=EndpointStats)

    def __post_init__(self) -> None:
        self.where = f"endpoint:{self.spec.subject}"
        self._waiting: deque[Request] = deque()
        self._workers: set[asyncio.Task[None]] = set()
        self._is_draining = False
        labels = (self.where,)
        self._outcomes = {
            outcome: metrics.HANDLED.labels(self.where, outcome)
            for outcome in ("ok", "failed", "malformed", "rejected")
        }
        self._seconds = metrics.HANDLER_SECONDS.labels(*labels)
        metrics.MAILBOX_MESSAGES.labels(*labels).set_function(lambda: len(self._waiting))
        metrics.RUNNING_HANDLERS.labels(*labels).set_function(lambda: len(self._workers))

    async def start(self, micro: MicroService) -> None:
        """Registers the endpoint with its types, for `$SRV.INFO` and for requests."""
        await micro.add_endpoint(
            name=re.sub(r"[^A-Za-z0-9_-]", "-", self.spec.subject),
            subject=self.spec.subject,
            queue_group=self.spec.queue or None,
            handler=self._accept,
            metadata={"request": self.spec.request_type.__name__, "mailbox": str(self.spec.mailbox)},
        )

    async def drain(self, hurry: asyncio.Event) -> None:
        """Answers accepted requests; once `hurry` is set, refuses the rest with NOT_READY.

        What comes later is refused too: without nats-server there was no unsubscribing.
        """
        self._is_draining = True
        await finish(self._workers, hurry)
        refusing = [asyncio.create_task(self._refuse_drained(request)) for request in self._waiting]
        self._waiting.clear()
        await finish(refusing, hurry)

    async def _refuse_drained(self, request: Request) -> None:
        await self._refuse(request, CallErrorCode.NOT_READY, "shutting down", RETRY_AFTER_MIN_S)

    async def _accept(self, request: Request) -> None:
        if self._is_draining:
            await self._refuse_drained(request)
        elif len(self._workers) < self.spec.concurrency:
            worker = asyncio.create_task(self._work(request), name=self.where)
            self._workers.add(worker)
            worker.add_done_callback(self._workers.discard)
        elif len(self._waiting) < self.spec.mailbox:
            self._waiting.append(request)
        else:
            self.stats.num_rejected += 1
            self._outcomes["rejected"].inc()
            await self._refuse(request, CallErrorCode.OVERLOADED, "mailbox full", self._retry_after_s())

    def _retry_after_s(self) -> float:
        """Returns the time in which half of a full mailbox is handled."""
        expected_s = self.stats.mean_handler_s * self.spec.mailbox / (2 * self.spec.concurrency)
        return min(max(expected_s, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)

    async def _work(self, request: Request | None) -> None:
        """Handles this request, then the waiting requests."""
        while request is not None:
            await self.guard.run(self.where, self._handle(request))
            request = self._waiting.popleft() if self._waiting else None

    async def _handle(self, request: Request) -> None:
        started_s = time.perf_counter()
        try:
            message = decode(request.data, self.spec.request_type)
            reply = await self._reply(request, message)
        except MalformedMessageError as error:
            self._count("malformed", started_s)
            log.error("malformed request refused", subject=self.spec.subject, reason=str(error))
            await self._refuse(request, CallErrorCode.INVALID, str(error))
        except CallFailedError as error:
            self._count("failed", started_s)
            await self._answer(request, b"", error_headers(error))
        except asyncio.CancelledError:
            await self._refuse_drained(request)
            raise
        else:
            if reply is None:
                self._count("failed", started_s)
                return
            self._count("ok", started_s)
            await self._send(request, reply)

    async def _reply(self, request: Request, message: Q) -> Message | None:
        """Returns the handler's reply; None after an unexpected failure, which it has answered."""
        traceparent = (request.headers or {}).get(tracing.HEADER, "")
        with tracing.span(self.spec.subject, traceparent):
            result = await self.guard.run(
                self.where,
                self.spec.handler(message),
                expected=(CallFailedError,),
            )
        if isinstance(result, Failure):
            reason = f"{result.error_type}: {result.reason}"
            await self._refuse(request, CallErrorCode.INTERNAL, reason)
            return None
        return result

    async def _send(self, request: Request, reply: Message) -> None:
        try:
            await self._answer(request, encode(reply), None)
        except OversizedMessageError as error:
            self.guard.record(self.where, error)
            await self._refuse(request, CallErrorCode.INTERNAL, str(error))

    async def _refuse(
        self, request: Request, code: CallErrorCode, reason: str, retry_after_s: float = 0.0
    ) -> None:
        await self._answer(request, b"", error_headers(CallFailedError(code, reason, retry_after_s)))

    async def _answer(self, request: Request, data: bytes, headers: dict[str, str] | None) -> None:
        reply_to: Any = request._msg.reply  # `Request.respond` would bypass the size check
        if reply_to:
            await self.bus.connection.publish(reply_to, data, headers=headers)

    def _count(self, outcome: str, started_s: float) -> None:
        took_s = time.perf_counter() - started_s
        self._outcomes[outcome].inc()
        self._seconds.observe(took_s)
        stats = self.stats
        stats.mean_handler_s += 0.1 * (took_s - stats.mean_handler_s)
        name = f"num_{outcome}"
        setattr(stats, name, getattr(stats, name) + 1)
