"""`ToolClient`: calls tools behind NATS.

Invariants: a call runs again elsewhere only if its tool says that this does no harm; what the caller no
longer wants is cancelled at the worker; a session's later calls go to the worker that has its objects;
a call always ends, since a dead worker is noticed and a full or absent one is waited for only so long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

import msgspec

from tailrace.bus import Bus, BusClosedError, CallFailedError, NoResponderError, OversizedMessageError
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.store import StoreConnection
from tailrace.tools import metrics
from tailrace.tools.attempt import Attempt, WorkerLostError
from tailrace.tools.discovery import Discovery
from tailrace.tools.episode_tools import EpisodeTools
from tailrace.tools.homes import Home, Homes
from tailrace.tools.port import ToolPort
from tailrace.tools.results import error_result, infra_result
from tailrace.tools.watch import Patience, WorkerWatch
from tailrace.tools.wire import JSON, ClaimCheck, ClaimCheckError
from tailrace_protos import subjects
from tailrace_protos.chat import ToolSchema
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.tool import (
    CallTool,
    CancelTools,
    ReleaseToolSession,
    ToolErrorKind,
    ToolResult,
    ToolSessionReleased,
)

log = get_logger(__name__)

SCOPE_LIFE_S = 5.0  # so long a run goes on asking where it last found a tool
RELEASE_TIMEOUT_S = 15.0  # a worker waits up to 10 s for a tool's own release
LATE_ACCEPT_S = 10.0


class UndeliverableError(Exception):
    """No worker took the call; the text says why."""


class ToolClient:
    """Calls tools for the episodes of one run. `redis` carries what is too big for a message."""

    def __init__(
        self,
        bus: Bus,
        run: str,
        *,
        redis: StoreConnection | None = None,
        patience: Patience | None = None,
    ) -> None:
        self.run = run
        self._patience = patience or Patience()
        self._port = ToolPort(bus)
        self.discovery = Discovery(self._port, run)
        self._claims = ClaimCheck(bus, redis)
        self._watch = WorkerWatch(self._port, self._patience)
        self._homes = Homes()
        self._schemas: dict[str, ToolSchema] = {}
        self._scopes: dict[str, tuple[str, float]] = {}
        self._idempotent: dict[str, bool] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    def session(
        self,
        episode_id: str,
        names: Sequence[str],
        *,
        create_kwargs: Mapping[str, dict[str, Any]] | None = None,
    ) -> EpisodeTools:
        """The tools of one episode; `create_kwargs` by tool name go to `Tool.create`."""
        return EpisodeTools(self, self.run, episode_id, names, create_kwargs)

    async def schemas(self, names: Sequence[str]) -> tuple[ToolSchema, ...]:
        """The schemas of `names`, in that order; waits for workers, then `ToolsMissingError`."""
        missing = [name for name in names if name not in self._schemas]
        if missing:
            found = await self.discovery.schemas(missing, self._patience.nobody_s)
            self._schemas.update((schema.name, schema) for schema in found)
        return tuple(self._schemas[name] for name in names)

    async def carry(self, request: CallTool) -> ToolResult:
        """Run a call at some worker; whatever goes wrong is in the result."""
        request = msgspec.structs.replace(request, lease_s=self._patience.lease_s)
        try:
            await self._port.open()
            request = await self._fitting(request)
            result = await self._run(request)
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

    async def release(self, session_id: str) -> None:
        """Release the session at every worker that has a part of it; `RELEASE_TIMEOUT_S` at most."""
        worker_ids = self._homes.forget(session_id)
        releases = [self._spawn(self._release(worker_id, session_id)) for worker_id in worker_ids]
        if releases:
            await asyncio.wait(releases)

    async def close(self) -> None:
        """Stop probing; releases and cancellations under way are finished."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=RELEASE_TIMEOUT_S)
        await self._watch.close()

    async def _fitting(self, request: CallTool) -> CallTool:
        """The request, its arguments put aside if they are too big for a message."""
        if not self._claims.is_possible or len(JSON.encode(request)) <= self._claims.max_bytes:
            return request
        ref = await self._claims.put(request.run, JSON.encode(request.arguments))
        return msgspec.structs.replace(request, arguments={}, arguments_blob=ref)

    # One call

    async def _run(self, request: CallTool) -> ToolResult:
        home = self._homes.of(request)
        while True:
            attempt = await self._deliver(request, home)
            try:
                return await attempt.result
            except WorkerLostError:
                if home.is_stateful or not attempt.accepted.result().is_idempotent:
                    raise
                metrics.REDELIVERIES.labels(request.name).inc()
                log.warning("call goes to another worker", tool=request.name, call_id=request.call_id)
            except asyncio.CancelledError:
                self._spawn(self._abandon(attempt))
                raise
            finally:
                self._watch.remove(attempt)
                self._port.forget(attempt.reply)

    async def _deliver(self, request: CallTool, home: Home) -> Attempt:
        """An accepted attempt; the first call of a session settles where the others go."""
        if home.is_settled:
            return await self._accepted(request, home)
        async with home.opening:
            if home.is_settled:
                return await self._accepted(request, home)
            attempt = await self._accepted(request, home)
            accepted = attempt.accepted.result()
            home.settle(accepted)
            if home.is_stateful:
                self._watch.add_session(accepted.worker_id, request.session_id)
            return attempt

    async def _accepted(self, request: CallTool, home: Home) -> Attempt:
        """Offer the call until a worker takes it."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(0.02, 1.0)
        started_s = loop.time()
        if home.is_stateful:
            request = msgspec.structs.replace(request, opens_session=False, create_kwargs={})
        while True:
            try:
                return await self._offer(request, home)
            except NoResponderError as error:
                patience_s = (
                    self._patience.absent_after_s if home.is_stateful else self._patience.nobody_s
                )
                reason, advised_s = str(error), 0.0
            except CallFailedError as error:
                if error.code not in (CallErrorCode.OVERLOADED, CallErrorCode.NOT_READY):
                    raise UndeliverableError(str(error)) from error
                patience_s, reason, advised_s = self._patience.full_s, str(error), error.retry_after_s
            except WorkerLostError:
                if home.is_stateful or not self._idempotent.get(request.name, False):
                    raise
                patience_s, reason, advised_s = self._patience.nobody_s, "nobody accepts calls", 0.0
            if loop.time() - started_s > patience_s:
                raise UndeliverableError(f"{reason} (waited {patience_s:g} s)")
            await asyncio.sleep(max(advised_s, backoff.next_s()))

    async def _offer(self, request: CallTool, home: Home) -> Attempt:
        """Send the call once, to the session's worker, the run's own workers, or everybody's."""
        if home.is_stateful:
            if self._watch.is_lost(home.worker_id):
                raise WorkerLostError(f"worker {home.worker_id}, which had the session, died")
            return await self._send(request, subjects.tool_worker(home.worker_id))
        now_s = asyncio.get_running_loop().time()
        known, known_until_s = self._scopes.get(request.name, ("", 0.0))
        scopes = [known] if now_s < known_until_s else [request.run, ""] if request.run else [""]
        for index, scope in enumerate(scopes):
            try:
                attempt = await self._send(request, subjects.tool(request.name, scope))
            except NoResponderError:
                self._scopes.pop(request.name, None)
                if index + 1 == len(scopes):
                    raise
                continue
            if len(scopes) > 1:
                self._scopes[request.name] = (scope, now_s + SCOPE_LIFE_S)
            return attempt
        raise AssertionError("there is always a scope")

    async def _send(self, request: CallTool, subject: str) -> Attempt:
        attempt = Attempt(request, subject)
        attempt.reply = self._port.expect(attempt.receive)
        try:
            await self._port.send(subject, request, attempt.reply)
            async with asyncio.timeout(self._patience.accept_s):
                accepted = await asyncio.shield(attempt.accepted)
        except asyncio.CancelledError:
            self._spawn(self._abandon(attempt))
            raise
        except TimeoutError as error:
            self._spawn(self._abandon(attempt))
            reason = (
                f"no worker accepted the call within {self._patience.accept_s:g} s; it may have run"
            )
            raise WorkerLostError(reason) from error
        except (NoResponderError, CallFailedError, WorkerLostError, OversizedMessageError):
            self._port.forget(attempt.reply)
            raise
        self._idempotent[request.name] = accepted.is_idempotent
        self._watch.add(attempt)
        return attempt

    # What nobody waits for any more

    async def _abandon(self, attempt: Attempt) -> None:
        """Cancel the call wherever it is, also if it is accepted only now."""
        try:
            async with asyncio.timeout(LATE_ACCEPT_S):
                accepted = await asyncio.shield(attempt.accepted)
                if accepted.worker_id:
                    cancel = CancelTools((attempt.request.call_id,))
                    await self._port.send(subjects.tool_worker(accepted.worker_id), cancel)
        except (
            TimeoutError,
            NoResponderError,
            CallFailedError,
            WorkerLostError,
            BusClosedError,
        ) as error:
            log.info("call given up", tool=attempt.request.name, reason=str(error))
        finally:
            self._port.forget(attempt.reply)

    async def _release(self, worker_id: str, session_id: str) -> None:
        subject = subjects.tool_worker(worker_id)
        try:
            if not self._watch.is_lost(worker_id):
                order = ReleaseToolSession(session_id)
                await self._port.ask(subject, order, ToolSessionReleased, RELEASE_TIMEOUT_S)
        except (TimeoutError, NoResponderError, CallFailedError, BusClosedError) as error:
            log.warning("session not released", worker_id=worker_id, reason=str(error))
        finally:
            self._watch.remove_session(worker_id, session_id)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
