"""`ToolWorker`: serves tools to all callers on NATS, as a micro service that can run anywhere.

Invariants: an endpoint's handler only accepts calls (nats-py awaits it before the next request); a call
is either refused with 503 and `Retry-After`, or accepted and answered once to each request with its id;
a repeated call does not run again; calls and sessions of silent callers end.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Coroutine, Sequence
from typing import Any

import msgspec
from nats.micro.request import Request

from tailrace import tracing
from tailrace.bus import Bus
from tailrace.log import get_logger
from tailrace.runtime.guard import Guard
from tailrace.runtime.service import Service
from tailrace.sdk.tool import AnyTool, ToolSpec
from tailrace.store import StoreConnection
from tailrace.tools import metrics
from tailrace.tools.calls import Cancellation, RunningCall, WorkerCalls
from tailrace.tools.conversion import error_result, infra_result
from tailrace.tools.discovery import Registration
from tailrace.tools.host import DEFAULT_MAX_CONCURRENCY, ToolHost
from tailrace.tools.wire import ClaimCheck, ClaimCheckError, Replies, ReplyTo, WireFormat
from tailrace_protos.base import MalformedMessageError, decode_json
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.tool import (
    CallTool,
    CancelTools,
    ProbeTools,
    ReleaseToolSession,
    ToolAccepted,
    ToolErrorKind,
    ToolResult,
    ToolSessionReleased,
    WorkerMessage,
)

log = get_logger(__name__)

RETRY_AFTER_MIN_S = 0.05
RETRY_AFTER_MAX_S = 2.0


class ToolWorker:
    """Worker that serves tools until `drain`; with `run` for this run only, before workers of all runs.

    `max_concurrency` calls run and `max_waiting` calls wait (default: the same number); the worker
    refuses further calls, and those that need a new object beside `max_sessions` (0: any number).
    `redis` stores results too large for a message.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool],
        bus: Bus,
        *,
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
        max_waiting: int | None = None,
        max_sessions: int = 0,
        run: str = "",
        worker_id: str = "",
        redis: StoreConnection | None = None,
    ) -> None:
        self.worker_id = worker_id or uuid.uuid4().hex
        self.host = ToolHost(tools, max_concurrency)
        self._bus = bus
        self._max_calls = max_concurrency + (max_concurrency if max_waiting is None else max_waiting)
        self._max_sessions = max_sessions
        self._claims = ClaimCheck(bus, redis)
        self._replies = Replies(bus, self._claims)
        self._calls = WorkerCalls()
        connection = bus.connection
        self._cancellation = Cancellation(
            self._calls, self.host, lambda: connection.is_connected, self._spawn
        )
        self._registration = Registration(bus, self.worker_id, run, self._load)
        self._guard = Guard(_on_stop_order)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_draining = False
        self._num_answering = 0  # calls that have ended and whose answers are under way
        self._mean_call_s = 0.0

    def join(self, service: Service) -> None:
        """Starts and drains with a service of the runtime."""
        service.on_start(self.start)
        service.on_drain(self.drain)

    async def start(self) -> None:
        """Registers the tools and starts to accept calls."""
        await self._registration.enter(self.host.specs, self._on_request)
        self._bus.connection.on_restored.append(self._calls.renew_all)
        self._spawn(self._cancellation.sweep(), "sweep")
        names = [spec.name for spec in self.host.specs]
        log.info("tools served", tools=names, worker_id=self.worker_id)

    async def drain(self, within_s: float = 10.0) -> None:
        """Accepts no new calls, waits `within_s` for running calls and open sessions, ends the rest."""
        self._is_draining = True
        try:
            async with asyncio.timeout(within_s):
                await self._registration.drain_tools()
                while self._is_busy:  # noqa: ASYNC110 - waits for several conditions
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("drain ends calls", num_calls=len(self._calls.running))
        finally:
            await self.close()

    @property
    def _is_busy(self) -> bool:
        return bool(self._calls.running or self._num_answering or self.host.num_objects)

    async def close(self) -> None:
        """Ends at once; waiting callers get an infrastructure failure."""
        self._is_draining = True
        for call in list(self._calls.running.values()):
            call.cancel()
            if self._bus.connection.is_connected:  # else the answer would wait, and the objects stay
                await self._answer(call, infra_result(call.request, "the tool worker was shut down"))
        await self.host.release_all()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=1.0)
        await self._registration.leave()

    # Requests

    async def _on_request(self, request: Request) -> None:
        headers = request.headers or {}
        to = ReplyTo(request._msg.reply, WireFormat.of(headers))
        try:
            message = to.format.decode(request.data, WorkerMessage)
        except MalformedMessageError as error:
            log.error("malformed request refused", subject=request.subject, reason=str(error))
            await self._replies.refuse(to, CallErrorCode.INVALID, str(error))
            return
        match message:
            case CallTool():
                await self._on_call(message, to, headers.get(tracing.HEADER, ""))
            case ProbeTools():
                await self._replies.send(to, self._calls.probed(message, self.host.session_ids))
            case CancelTools():
                for call_id in message.call_ids:
                    self._cancellation.cancel(call_id)
            case ReleaseToolSession():
                self._spawn(self._release(message.session_id, to), "release")

    async def _on_call(self, request: CallTool, to: ReplyTo, traceparent: str) -> None:
        spec = self.host.spec(request.name)
        if not to.subject or spec is None:
            await self._replies.refuse(to, CallErrorCode.INVALID, f"no tool {request.name!r} here")
            return
        if await self._is_repeated(request, spec, to):
            return
        if not self._has_room(request):
            metrics.REFUSED.labels(request.name).inc()
            await self._refuse_full(request, to)
            return
        call = self._calls.begin(request, to)
        self.host.open(request)
        if request.session_id in self.host.session_ids:
            now_s = asyncio.get_running_loop().time()
            self._calls.session_leases.begin(request.session_id, request.lease_s, now_s)
        serving = self._serve(call, self._acceptance(request, spec), traceparent)
        call.task = self._spawn(serving, f"tool {request.name}")
        call.task.add_done_callback(lambda _: self._end(call, serving))

    def _end(self, call: RunningCall, serving: Coroutine[Any, Any, None]) -> None:
        """Removes a call that was cancelled before `serving` began."""
        serving.close()
        if self._calls.running.get(call.request.call_id) is call:
            self._calls.end(call.request.call_id)

    async def _is_repeated(self, request: CallTool, spec: ToolSpec, to: ReplyTo) -> bool:
        """Tells if the call is known here; a repeated call gets the answer of the first."""
        finished = self._calls.finished(request.call_id)
        running = self._calls.running.get(request.call_id)
        if finished is None and running is None:
            return False
        metrics.REPEATED.inc()
        if finished is not None:
            await self._replies.result(to, finished, request.run)
        elif running is not None:
            running.replies.append(to)
            await self._replies.send(to, self._acceptance(request, spec))
        return True

    def _acceptance(self, request: CallTool, spec: ToolSpec) -> ToolAccepted:
        return ToolAccepted(request.call_id, self.worker_id, spec.is_idempotent, spec.is_stateful)

    def _has_room(self, request: CallTool) -> bool:
        if self._is_draining and request.session_id not in self.host.session_ids:
            return False
        if self._lacks_object(request):
            return False
        return len(self._calls.running) + self.host.num_abandoned < self._max_calls

    def _lacks_object(self, request: CallTool) -> bool:
        """True if the call needs an object that may not be made now."""
        is_full = 0 < self._max_sessions <= self.host.num_objects
        return is_full and self.host.opens(request)

    async def _refuse_full(self, request: CallTool, to: ReplyTo) -> None:
        if self._is_draining:
            await self._replies.refuse(to, CallErrorCode.NOT_READY, "shutting down", RETRY_AFTER_MIN_S)
            return
        retry_after_s = min(max(self._mean_call_s / 2, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
        num_running, num_abandoned = len(self._calls.running), self.host.num_abandoned
        reason = f"{num_running} calls here, {num_abandoned} abandoned calls still run"
        if self._lacks_object(request):
            reason = f"{self.host.num_objects} sessions are open, and no more may be"
        await self._replies.refuse(to, CallErrorCode.OVERLOADED, reason, retry_after_s)

    async def _serve(self, call: RunningCall, accepted: ToolAccepted, traceparent: str) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        request = call.request
        try:
            await self._replies.send(call.replies[0], accepted)
            with tracing.span(f"tool.{request.name}", traceparent, episode_id=request.episode_id):
                result = await self.host.run(await self._with_arguments(request))
        except ClaimCheckError as error:
            result = infra_result(request, f"cannot fetch the arguments: {error}")
        except MalformedMessageError as error:
            result = error_result(request, ToolErrorKind.INVALID_ARGUMENTS, str(error))
        finally:
            self._calls.end(request.call_id)
        self._mean_call_s += 0.1 * (loop.time() - started_s - self._mean_call_s)
        await self._answer(call, result)

    async def _with_arguments(self, request: CallTool) -> CallTool:
        if not request.arguments_blob:
            return request
        data = await self._claims.get(request.run, request.arguments_blob)
        return msgspec.structs.replace(request, arguments=decode_json(data, dict[str, Any]))

    async def _answer(self, call: RunningCall, result: ToolResult) -> None:
        self._calls.finish(result)
        self._num_answering += 1
        try:
            for to in call.replies:
                await self._replies.result(to, result, call.request.run)
        finally:
            self._num_answering -= 1

    async def _release(self, session_id: str, to: ReplyTo) -> None:
        await self._cancellation.end_session(session_id)
        await self._replies.send(to, ToolSessionReleased(session_id))

    def _spawn(self, work: Awaitable[Any], name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(self._guard.run(name, work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _load(self) -> dict[str, int]:
        return {
            "num_running": self.host.num_running,
            "num_waiting": len(self._calls.running) - self.host.num_running,
            "num_abandoned": self.host.num_abandoned,
            "num_sessions": len(self.host.session_ids),
            "max_concurrency": self.host.max_concurrency,
        }


def _on_stop_order(reason: str, _exit_code: int) -> None:
    log.error("a tool asked this process to stop", reason=reason)
