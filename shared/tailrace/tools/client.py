"""`ToolClient`: calls tools over NATS.

Invariants: a call runs again at another worker only if its tool is idempotent; a call that its caller
cancels is cancelled at the worker; later calls of a session go to the worker that has its objects; each
call ends, since dead workers are detected, and the number of workers that a call may lose and the wait
for full or absent workers are limited.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tailrace.bus import Bus, BusClosedError, CallFailedError, NoResponderError, OversizedMessageError
from tailrace.log import get_logger
from tailrace.store import StoreConnection
from tailrace.tools import metrics
from tailrace.tools.conversion import error_result, infra_result
from tailrace.tools.delivery import CallDelivery, SessionAffinities, UndeliverableError
from tailrace.tools.discovery import Discovery
from tailrace.tools.episode_tools import EpisodeTools
from tailrace.tools.port import CallAttempt, MalformedAnswerError, ToolPort, WorkerLostError
from tailrace.tools.watch import ToolDeadlines, WorkerWatch
from tailrace.tools.wire import JSON, ClaimCheck, ClaimCheckError
from tailrace_protos import subjects
from tailrace_protos.chat import ToolSchema
from tailrace_protos.tool import (
    CallTool,
    ReleaseToolSession,
    ToolErrorKind,
    ToolResult,
    ToolSessionReleased,
)

log = get_logger(__name__)

MAX_DELIVERIES = 5  # of one call: it may be what its workers die of
RELEASE_TIMEOUT_S = 15.0  # a worker waits up to 10 s for the release code of a tool


class ToolClient:
    """Client of tools for the episodes of one run. `redis` stores payloads too large for a message.

    `pins`: hashes of schemas by tool name (`tailrace.tools.discovery.schema_hash`).
    """

    def __init__(
        self,
        bus: Bus,
        run: str,
        *,
        redis: StoreConnection | None = None,
        deadlines: ToolDeadlines | None = None,
        pins: Mapping[str, str] | None = None,
    ) -> None:
        self.run = run
        self._deadlines = deadlines or ToolDeadlines()
        self._port = ToolPort(bus)
        self.discovery = Discovery(self._port, run, pins)
        self._claims = ClaimCheck(bus, redis)
        self._watch = WorkerWatch(self._port, self._deadlines)
        self._delivery = CallDelivery(self._port, self._watch, self._deadlines)
        self._affinities = SessionAffinities()
        self._schemas: dict[str, ToolSchema] = {}
        self._stateful: set[str] = set()  # names of tools that were called and keep objects

    def session(
        self,
        episode_id: str,
        names: Sequence[str],
        *,
        create_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> EpisodeTools:
        """Returns the tools of one episode; `create_kwargs` by tool name go to `Tool.create`."""
        return EpisodeTools(self, self.run, episode_id, names, create_kwargs)

    async def schemas(self, names: Sequence[str]) -> tuple[ToolSchema, ...]:
        """Returns the schemas of `names`, in order; waits for workers as `Discovery.schemas` does."""
        missing = [name for name in names if name not in self._schemas]
        if missing:
            found = await self.discovery.schemas(missing, self._deadlines.nobody_s)
            self._schemas.update((schema.name, schema) for schema in found)
        return tuple(self._schemas[name] for name in names)

    async def run_call(self, request: CallTool) -> ToolResult:
        """Runs a call at a worker; the result also reports failures."""
        request = msgspec.structs.replace(request, lease_s=self._deadlines.lease_s)
        try:
            await self._port.open()
            result = await self._run(await self._fitting(request))
            if result.content_blob:
                content = await self._claims.get(request.run, result.content_blob)
                result = msgspec.structs.replace(result, content=content.decode(), content_blob="")
        except OversizedMessageError as error:
            text = f"the arguments have {error.num_bytes} bytes, at most {error.max_bytes} can be sent"
            return error_result(request, ToolErrorKind.TOO_LARGE, text)
        except (UndeliverableError, WorkerLostError, BusClosedError) as error:
            return infra_result(request, f"{request.name}: {error}")
        except ClaimCheckError as error:
            return infra_result(request, f"{request.name}: a payload is lost: {error}")
        return result

    def is_stateful(self, name: str) -> bool:
        """See `CallRunner`."""
        return name in self._stateful

    async def release(self, session_id: str) -> None:
        """Releases the session at all workers that have its objects, within `RELEASE_TIMEOUT_S`."""
        worker_ids = self._affinities.forget(session_id)
        releases = [
            self._delivery.spawn(self._release(worker_id, session_id)) for worker_id in worker_ids
        ]
        if releases:
            await asyncio.wait(releases)

    async def close(self) -> None:
        """Finishes pending releases and cancellations, then stops the probes."""
        if self._delivery.tasks:
            await asyncio.wait(set(self._delivery.tasks), timeout=RELEASE_TIMEOUT_S)
        await self._watch.close()

    async def _fitting(self, request: CallTool) -> CallTool:
        """Returns the request, with its arguments in a blob if they are too large for a message."""
        if not self._claims.is_possible or len(JSON.encode(request)) <= self._claims.max_bytes:
            return request
        ref = await self._claims.put(request.run, JSON.encode(request.arguments))
        return msgspec.structs.replace(request, arguments={}, arguments_blob=ref)

    async def _run(self, request: CallTool) -> ToolResult:
        affinity = self._affinities.of(request)
        reason = ""
        for _ in range(MAX_DELIVERIES):
            attempt = await self._delivery.deliver(request, affinity)
            if affinity.is_stateful:
                self._stateful.add(request.name)
            try:
                return await self._result(attempt)
            except MalformedAnswerError:
                raise
            except WorkerLostError as error:
                if affinity.is_stateful or not attempt.accepted.result().is_idempotent:
                    raise
                reason = str(error)
                metrics.REDELIVERIES.labels(request.name).inc()
                log.warning("call goes to another worker", tool=request.name, call_id=request.call_id)
            except asyncio.CancelledError:
                self._delivery.abandon(attempt, affinity)
                raise
            finally:
                self._delivery.forget(attempt)
        raise WorkerLostError(f"{MAX_DELIVERIES} workers lost it; at last: {reason}")

    async def _result(self, attempt: CallAttempt) -> ToolResult:
        """Returns the result of an attempt; limits the wait for a worker without probes."""
        if attempt.worker_id:
            return await attempt.result
        within_s = self._deadlines.unprobed_s
        try:
            async with asyncio.timeout(within_s):
                return await attempt.result
        except TimeoutError as error:
            raise WorkerLostError(f"no result within {within_s:g} s") from error

    async def _release(self, worker_id: str, session_id: str) -> None:
        subject = subjects.tool_worker(worker_id)
        try:
            if not self._watch.is_lost(worker_id, session_id):
                order = ReleaseToolSession(session_id)
                await self._port.ask(subject, order, ToolSessionReleased, RELEASE_TIMEOUT_S)
        except (TimeoutError, NoResponderError, CallFailedError, BusClosedError) as error:
            log.warning("session not released", worker_id=worker_id, reason=str(error))
        finally:
            self._watch.remove_session(worker_id, session_id)
