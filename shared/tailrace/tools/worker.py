"""`ToolWorker`: serves tools to every caller on NATS, as a micro service that anyone runs anywhere.

Invariants: an endpoint's handler only accepts (nats-py awaits it before the next request); a call is
either refused with 503 and `Retry-After`, or accepted and answered once to everybody who asked with its
id; a call that comes again is not run again; calls and sessions whose callers fall silent end.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import nats.micro
from nats.micro.request import Request
from nats.micro.service import EndpointStats
from nats.micro.service import Service as MicroService

from tailrace import tracing
from tailrace.bus import Bus, CallFailedError
from tailrace.bus.calls import error_headers
from tailrace.log import get_logger
from tailrace.runtime.guard import Guard
from tailrace.runtime.service import Service
from tailrace.sdk.tool import AnyTool, ToolSpec
from tailrace.store import StoreConnection
from tailrace.tools import metrics
from tailrace.tools.finished import FinishedCalls
from tailrace.tools.host import DEFAULT_MAX_CONCURRENCY, ToolHost
from tailrace.tools.leases import Leases
from tailrace.tools.results import error_result, infra_result, too_large
from tailrace.tools.wire import ClaimCheck, ClaimCheckError, Form
from tailrace_protos import subjects
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
    ToolsProbed,
    WorkerMessage,
)

log = get_logger(__name__)

SERVICE_NAME = "tool_worker"  # the micro service's, in every language
CONTRACT_VERSION = "1.0.0"
SWEEP_S = 0.5
MIN_RETRY_AFTER_S = 0.05


@dataclass
class _Call:
    """A call that was accepted and is not over."""

    request: CallTool
    replies: list[tuple[str, Form]] = field(default_factory=list)
    task: asyncio.Task[Any] | None = None


class ToolWorker:
    """Serves tools until `drain`. `run`: for this run only, where it wins over workers for all.

    `max_waiting` calls wait when `max_concurrency` run (default: as many again); one more is refused.
    """

    def __init__(
        self,
        tools: Sequence[AnyTool],
        bus: Bus,
        *,
        max_concurrency: int = DEFAULT_MAX_CONCURRENCY,
        max_waiting: int | None = None,
        run: str = "",
        worker_id: str = "",
        redis: StoreConnection | None = None,
        guard: Guard | None = None,
    ) -> None:
        self.worker_id = worker_id or uuid.uuid4().hex
        self.host = ToolHost(tools, max_concurrency)
        self._bus = bus
        self._run = run
        self._max_calls = max_concurrency + (max_concurrency if max_waiting is None else max_waiting)
        self._claims = ClaimCheck(bus, redis)
        self._guard = guard or Guard(
            lambda reason, _code: log.error("a tool asks to stop", reason=reason)
        )
        self._calls: dict[str, _Call] = {}
        self._finished = FinishedCalls()
        self._call_leases = Leases()
        self._session_leases = Leases()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._micro: MicroService | None = None
        self._is_draining = False
        self._mean_call_s = 0.0

    def join(self, service: Service) -> None:
        """Start and drain with a service of the runtime."""
        service.on_start(self.start)
        service.on_drain(self.drain)

    async def start(self) -> None:
        """Register the tools; calls come from here on."""
        client = self._bus.connection.client
        self._micro = await nats.micro.add_service(
            client,
            name=SERVICE_NAME,
            version=CONTRACT_VERSION,
            description="Tailrace tool worker",
            metadata={"worker_id": self.worker_id, "run": self._run},
            stats_handler=self._stats,
        )
        own = subjects.tool_worker(self.worker_id)
        await self._micro.add_endpoint(name="worker", subject=own, handler=self._on_request)
        for spec in self.host.specs:
            await self._micro.add_endpoint(
                name=spec.name,
                subject=subjects.tool(spec.name, self._run),
                handler=self._on_request,
                metadata=endpoint_metadata(spec),
            )
        await client.flush()
        self._bus.connection.on_restored.append(self._on_restored)
        self._spawn(self._sweep(), "sweep")
        log.info(
            "tools served", tools=[spec.name for spec in self.host.specs], worker_id=self.worker_id
        )

    async def drain(self, within_s: float = 10.0) -> None:
        """Take no new calls, let what runs and open sessions end within `within_s`, end the rest."""
        self._is_draining = True
        for endpoint in self._micro._endpoints if self._micro else ():
            if endpoint._name != "worker" and endpoint._subscription is not None:
                await self._bus.connection.drain(endpoint._subscription)
        try:
            async with asyncio.timeout(within_s):
                while self._calls or self.host.session_ids:  # noqa: ASYNC110 - two kinds of ends
                    await asyncio.sleep(0.02)
        except TimeoutError:
            log.warning("drain ends calls", num_calls=len(self._calls))
        await self.close()

    async def close(self) -> None:
        """End at once: whoever waits hears that this worker is gone."""
        self._is_draining = True
        for call in list(self._calls.values()):
            if call.task is not None:
                call.task.cancel()
            await self._answer(call, infra_result(call.request, "the tool worker was shut down"))
        await self.host.release_all()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=1.0)

    # Requests

    async def _on_request(self, request: Request) -> None:
        form = Form.of(request.headers)
        reply = request._msg.reply
        try:
            message = form.decode(request.data, WorkerMessage)
        except MalformedMessageError as error:
            log.error("malformed request refused", subject=request.subject, reason=str(error))
            await self._refuse(reply, CallErrorCode.INVALID, str(error))
            return
        match message:
            case CallTool():
                await self._on_call(
                    message, reply, form, (request.headers or {}).get(tracing.HEADER, "")
                )
            case ProbeTools():
                await self._reply(reply, form, self._on_probe(message))
            case CancelTools():
                for call_id in message.call_ids:
                    self._cancel(call_id)
            case ReleaseToolSession():
                self._spawn(self._release(message.session_id, reply, form), "release")

    async def _on_call(self, request: CallTool, reply: str, form: Form, traceparent: str) -> None:
        spec = self.host.spec(request.name)
        if not reply or spec is None:
            await self._refuse(reply, CallErrorCode.INVALID, f"no tool {request.name!r} here")
            return
        finished = self._finished.get(request.call_id)
        if finished is not None:
            metrics.REPEATED.inc()
            await self._send(finished, [(reply, form)], request.run)
            return
        call = self._calls.get(request.call_id)
        if call is None and not self._has_room(request):
            metrics.REFUSED.labels(request.name).inc()
            await self._refuse_full(reply)
            return
        accepted = ToolAccepted(request.call_id, self.worker_id, spec.is_idempotent, spec.is_stateful)
        await self._reply(reply, form, accepted)
        if call is not None:
            metrics.REPEATED.inc()
            call.replies.append((reply, form))
            return
        call = self._calls[request.call_id] = _Call(request, [(reply, form)])
        self._begin_leases(request)
        call.task = self._spawn(self._serve(call, traceparent), f"tool {request.name}")

    def _has_room(self, request: CallTool) -> bool:
        if self._is_draining and request.session_id not in self.host.session_ids:
            return False
        return len(self._calls) + self.host.num_abandoned < self._max_calls

    def _begin_leases(self, request: CallTool) -> None:
        now_s = asyncio.get_running_loop().time()
        self._call_leases.begin(request.call_id, request.lease_s, now_s)
        self.host.open(request)
        if request.session_id in self.host.session_ids:
            self._session_leases.begin(request.session_id, request.lease_s, now_s)

    async def _serve(self, call: _Call, traceparent: str) -> None:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        request = call.request
        try:
            with tracing.span(f"tool.{request.name}", traceparent, episode_id=request.episode_id):
                if request.arguments_blob:
                    data = await self._claims.get(request.run, request.arguments_blob)
                    arguments = decode_json(data, dict[str, Any])
                    request = msgspec.structs.replace(request, arguments=arguments, arguments_blob="")
                result = await self.host.run(request)
        except ClaimCheckError as error:
            result = infra_result(request, f"cannot fetch the arguments: {error}")
        except MalformedMessageError as error:
            result = error_result(request, ToolErrorKind.INVALID_ARGUMENTS, str(error))
        finally:
            self._calls.pop(request.call_id, None)
            self._call_leases.end(request.call_id)
        self._mean_call_s += 0.1 * (loop.time() - started_s - self._mean_call_s)
        await self._answer(call, result)

    def _on_probe(self, probe: ProbeTools) -> ToolsProbed:
        now_s = asyncio.get_running_loop().time()
        self._call_leases.renew(probe.call_ids, now_s)
        self._session_leases.renew(probe.session_ids, now_s)
        alive = self.host.session_ids
        return ToolsProbed(
            tuple(call_id for call_id in probe.call_ids if call_id in self._calls),
            tuple(call_id for call_id in probe.call_ids if self._finished.get(call_id)),
            tuple(session_id for session_id in probe.session_ids if session_id in alive),
        )

    def _cancel(self, call_id: str) -> None:
        call = self._calls.get(call_id)
        if call is not None and call.task is not None:
            call.task.cancel()

    async def _release(self, session_id: str, reply: str, form: Form) -> None:
        await self._end_session(session_id)
        await self._reply(reply, form, ToolSessionReleased(session_id))

    async def _end_session(self, session_id: str) -> None:
        calls = [call for call in self._calls.values() if call.request.session_id == session_id]
        tasks = {call.task for call in calls if call.task is not None}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._session_leases.end(session_id)
        await self.host.release(session_id)

    # Callers that fell silent

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            if not self._bus.connection.is_connected:
                continue
            now_s = asyncio.get_running_loop().time()
            for call_id in self._call_leases.expired(now_s):
                log.warning("caller fell silent", call_id=call_id)
                metrics.EXPIRED.labels("call").inc()
                self._call_leases.end(call_id)
                self._cancel(call_id)
            for session_id in self._session_leases.expired(now_s):
                log.warning("session's caller fell silent", session_id=session_id)
                metrics.EXPIRED.labels("session").inc()
                self._session_leases.end(session_id)
                self._spawn(self._end_session(session_id), "expired session")

    def _on_restored(self) -> None:
        now_s = asyncio.get_running_loop().time()
        self._call_leases.renew_all(now_s)
        self._session_leases.renew_all(now_s)

    # Replies

    async def _answer(self, call: _Call, result: ToolResult) -> None:
        self._finished.add(result, asyncio.get_running_loop().time())
        await self._send(result, call.replies, call.request.run)

    async def _send(self, result: ToolResult, replies: list[tuple[str, Form]], run: str) -> None:
        for reply, form in replies:
            data = form.encode(result)
            if len(data) > self._claims.max_bytes:
                data = form.encode(await self._put_aside(result, run, len(data)))
            await self._bus.connection.publish(reply, data, headers=form.headers)

    async def _put_aside(self, result: ToolResult, run: str, num_bytes: int) -> ToolResult:
        content = result.content.encode()
        if not self._claims.is_possible:
            request = CallTool(result.call_id, result.name)
            remedy = " by a worker without Redis"
            return too_large(request, len(content), self._claims.max_bytes, remedy)
        try:
            ref = await self._claims.put(run, content)
        except ClaimCheckError as error:
            return infra_result(
                CallTool(result.call_id, result.name), f"cannot keep the result: {error}"
            )
        return msgspec.structs.replace(result, content="", content_blob=ref)

    async def _reply(self, reply: str, form: Form, message: object) -> None:
        if reply:
            await self._bus.connection.publish(reply, form.encode(message), headers=form.headers)

    async def _refuse_full(self, reply: str) -> None:
        if self._is_draining:
            await self._refuse(reply, CallErrorCode.NOT_READY, "shutting down", MIN_RETRY_AFTER_S)
            return
        retry_after_s = min(max(self._mean_call_s / 2, MIN_RETRY_AFTER_S), 2.0)
        reason = f"{len(self._calls)} calls here, {self.host.num_abandoned} given up still run"
        await self._refuse(reply, CallErrorCode.OVERLOADED, reason, retry_after_s)

    async def _refuse(
        self, reply: str, code: CallErrorCode, reason: str, retry_after_s: float = 0.0
    ) -> None:
        if reply:
            headers = error_headers(CallFailedError(code, reason, retry_after_s))
            await self._bus.connection.publish(reply, b"", headers=headers)

    def _spawn(self, work: Any, name: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(self._guard.run(name, work), name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _stats(self, _of: EndpointStats) -> dict[str, Any]:
        return {
            "num_running": self.host.num_running,
            "num_waiting": len(self._calls) - self.host.num_running,
            "num_abandoned": self.host.num_abandoned,
            "num_sessions": len(self.host.session_ids),
            "max_concurrency": self.host.max_concurrency,
        }


def endpoint_metadata(spec: ToolSpec) -> dict[str, str]:
    """What `$SRV.INFO` says of a tool; NATS takes strings only."""
    return {
        "tool": spec.name,
        "description": spec.description,
        "schema": msgspec.json.encode(spec.schema.parameters).decode(),
        "is_idempotent": str(spec.is_idempotent).lower(),
        "is_stateful": str(spec.is_stateful).lower(),
        "timeout_s": f"{spec.timeout_s:g}",
    }
