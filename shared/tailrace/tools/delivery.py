"""Delivery of calls: offers a call until a worker accepts it, and cancels abandoned calls.

Session affinity: the first call of a session and tool chooses the worker of the later calls.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from tailrace.bus import BusError, CallFailedError, NoResponderError
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.tools.port import CallAttempt, ToolPort, WorkerLostError
from tailrace.tools.watch import ToolDeadlines, WorkerWatch
from tailrace_protos import subjects
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.tool import CallTool, CancelTools, ReleaseToolSession, ToolAccepted

log = get_logger(__name__)

SCOPE_LIFE_S = 5.0  # life time of the knowledge who serves a tool
LATE_ACCEPT_S = 10.0
PASSING = (CallErrorCode.OVERLOADED, CallErrorCode.NOT_READY)


class SessionAffinity:
    """Affinity of one session and one tool."""

    def __init__(self) -> None:
        self.opening = asyncio.Lock()  # held until the first call is accepted
        self.is_settled = False
        self.worker_id = ""  # worker with the tool's object; empty for a tool without state
        self.is_released = False

    @property
    def is_stateful(self) -> bool:
        """True if all calls must go to `worker_id`."""
        return bool(self.worker_id)

    def settle(self, accepted: ToolAccepted) -> None:
        """Chooses the worker, after the first call was accepted."""
        self.is_settled = True
        self.worker_id = accepted.worker_id if accepted.is_stateful else ""


class SessionAffinities:
    """Affinities of all sessions of this process."""

    def __init__(self) -> None:
        self._affinities: dict[str, dict[str, SessionAffinity]] = {}  # session id -> tool -> affinity

    def of(self, request: CallTool) -> SessionAffinity:
        """Returns the affinity of a call."""
        if not request.session_id:
            return SessionAffinity()
        return self._affinities.setdefault(request.session_id, {}).setdefault(
            request.name, SessionAffinity()
        )

    def forget(self, session_id: str) -> set[str]:
        """Removes a session; returns the workers that have its objects."""
        affinities = self._affinities.pop(session_id, {})
        for affinity in affinities.values():
            affinity.is_released = True
        return {affinity.worker_id for affinity in affinities.values() if affinity.is_stateful}


class UndeliverableError(Exception):
    """No worker accepted the call; the text gives the reason."""


class CallDelivery:
    """Delivery of the calls of one run."""

    def __init__(self, port: ToolPort, watch: WorkerWatch, deadlines: ToolDeadlines) -> None:
        self._port = port
        self._watch = watch
        self._deadlines = deadlines
        self._scopes: dict[str, tuple[str, float]] = {}  # tool -> run that serves it, until when
        self._idempotent: dict[str, bool] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    async def deliver(self, request: CallTool, affinity: SessionAffinity) -> CallAttempt:
        """Returns an accepted attempt; the first call of a session chooses its worker.

        Raises `UndeliverableError`, `WorkerLostError`, `OversizedMessageError`, `BusClosedError`.
        """
        async with affinity.opening:
            if not affinity.is_settled:
                return await self._settled(request, affinity)
        return await self._accepted(request, affinity)

    async def _settled(self, request: CallTool, affinity: SessionAffinity) -> CallAttempt:
        attempt = await self._accepted(request, affinity)
        self._settle(attempt, affinity)
        return attempt

    def _settle(self, attempt: CallAttempt, affinity: SessionAffinity) -> None:
        affinity.settle(attempt.accepted.result())
        if affinity.is_stateful:
            self._watch.add_session(affinity.worker_id, attempt.request.session_id)

    def abandon(self, attempt: CallAttempt, affinity: SessionAffinity) -> None:
        """Cancels an abandoned attempt, also one that is accepted later."""
        self.spawn(self._take_back(attempt, affinity))

    def forget(self, attempt: CallAttempt) -> None:
        """Removes an attempt that has ended."""
        self._watch.remove(attempt)
        self._port.forget(attempt.reply)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs work in the background."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    async def _accepted(self, request: CallTool, affinity: SessionAffinity) -> CallAttempt:
        """Offers the call until a worker accepts it."""
        loop = asyncio.get_running_loop()
        backoff = Backoff(0.02, 1.0)
        started_s = loop.time()
        if affinity.is_stateful:
            request = msgspec.structs.replace(request, opens_session=False, create_kwargs={})
        while True:
            try:
                return await self._offer(request, affinity)
            except (BusError, WorkerLostError) as error:
                deadline_s, advised_s = self._deadline_after(error, request, affinity)
                if loop.time() - started_s > deadline_s:
                    raise UndeliverableError(f"{error} (waited {deadline_s:g} s)") from error
            await asyncio.sleep(max(advised_s, backoff.next_s()))

    def _deadline_after(
        self, error: BusError | WorkerLostError, request: CallTool, affinity: SessionAffinity
    ) -> tuple[float, float]:
        """Returns the total time limit after `error` and the next delay; raises final errors."""
        deadlines = self._deadlines
        if isinstance(error, NoResponderError):
            return (deadlines.absent_after_s if affinity.is_stateful else deadlines.nobody_s), 0.0
        if isinstance(error, CallFailedError) and error.code in PASSING:
            return deadlines.full_s, error.retry_after_s
        may_run_again = self._idempotent.get(request.name, False) and not affinity.is_stateful
        if isinstance(error, WorkerLostError) and may_run_again:
            return deadlines.nobody_s, 0.0
        if isinstance(error, CallFailedError):
            raise UndeliverableError(str(error)) from error
        raise error

    async def _offer(self, request: CallTool, affinity: SessionAffinity) -> CallAttempt:
        """Sends the call once: to the session's worker, workers of the run, or workers of all runs."""
        if affinity.is_stateful:
            if self._watch.is_lost(affinity.worker_id, request.session_id):
                raise WorkerLostError(f"worker {affinity.worker_id}, which had the session, died")
            return await self._send(request, subjects.tool_worker(affinity.worker_id), affinity)
        now_s = asyncio.get_running_loop().time()
        known, until_s = self._scopes.pop(request.name, ("", 0.0))
        if request.run and now_s >= until_s:
            try:
                attempt = await self._send(request, subjects.tool(request.name, request.run), affinity)
            except NoResponderError:
                known = ""
            else:
                self._scopes[request.name] = (request.run, now_s + SCOPE_LIFE_S)
                return attempt
        attempt = await self._send(request, subjects.tool(request.name, known), affinity)
        self._scopes[request.name] = (known, max(until_s, now_s + SCOPE_LIFE_S))
        return attempt

    async def _send(self, request: CallTool, subject: str, affinity: SessionAffinity) -> CallAttempt:
        attempt = CallAttempt(request, subject)
        attempt.reply = self._port.expect(attempt.receive)
        try:
            await self._port.send(subject, request, attempt.reply)
            async with asyncio.timeout(self._deadlines.accept_s):
                accepted = await asyncio.shield(attempt.accepted)
        except asyncio.CancelledError:
            self.abandon(attempt, affinity)
            raise
        except TimeoutError as error:
            self.abandon(attempt, affinity)
            within = f"within {self._deadlines.accept_s:g} s"
            raise WorkerLostError(f"no worker accepted the call {within}; it may have run") from error
        except (BusError, WorkerLostError):
            self._port.forget(attempt.reply)
            raise
        self._idempotent[request.name] = accepted.is_idempotent
        self._watch.add(attempt)
        return attempt

    async def _take_back(self, attempt: CallAttempt, affinity: SessionAffinity) -> None:
        try:
            async with asyncio.timeout(LATE_ACCEPT_S):
                accepted = await asyncio.shield(attempt.accepted)
            if accepted.worker_id:
                await self._call_off(attempt, accepted, affinity)
        except (TimeoutError, BusError, WorkerLostError) as error:
            log.info("call abandoned", tool=attempt.request.name, reason=str(error))
        finally:
            self._port.forget(attempt.reply)

    async def _call_off(
        self, attempt: CallAttempt, accepted: ToolAccepted, affinity: SessionAffinity
    ) -> None:
        """Cancels a call; keeps its object for the session, or releases it."""
        own = subjects.tool_worker(accepted.worker_id)
        await self._port.send(own, CancelTools((attempt.request.call_id,)))
        if not accepted.is_stateful or affinity.worker_id == accepted.worker_id:
            return
        if affinity.is_settled or affinity.is_released:
            await self._port.send(own, ReleaseToolSession(attempt.request.session_id))
        else:
            self._settle(attempt, affinity)
