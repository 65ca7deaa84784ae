"""Getting a call to a worker: offered until one accepts it, taken back when nobody waits any more."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from tailrace.bus import BusError, CallFailedError, NoResponderError
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.tools.attempt import Attempt, WorkerLostError
from tailrace.tools.homes import Home
from tailrace.tools.port import ToolPort
from tailrace.tools.watch import ToolDeadlines, WorkerWatch
from tailrace_protos import subjects
from tailrace_protos.generation import CallErrorCode
from tailrace_protos.tool import CallTool, CancelTools, ReleaseToolSession, ToolAccepted

log = get_logger(__name__)

SCOPE_LIFE_S = 5.0  # so long a run goes on asking where it last found a tool
LATE_ACCEPT_S = 10.0
PASSING = (CallErrorCode.OVERLOADED, CallErrorCode.NOT_READY)


class UndeliverableError(Exception):
    """No worker took the call; the text says why."""


class Delivery:
    """Delivers the calls of one run."""

    def __init__(self, port: ToolPort, watch: WorkerWatch, deadlines: ToolDeadlines) -> None:
        self._port = port
        self._watch = watch
        self._deadlines = deadlines
        self._scopes: dict[str, tuple[str, float]] = {}  # tool -> run that serves it, until when
        self._idempotent: dict[str, bool] = {}
        self.tasks: set[asyncio.Task[Any]] = set()

    async def deliver(self, request: CallTool, home: Home) -> Attempt:
        """An accepted attempt; the first call of a session settles where the others go.

        Raises `UndeliverableError`, `WorkerLostError`, `OversizedMessageError`, `BusClosedError`.
        """
        async with home.opening:
            if not home.is_settled:
                return await self._settled(request, home)
        return await self._accepted(request, home)

    async def _settled(self, request: CallTool, home: Home) -> Attempt:
        attempt = await self._accepted(request, home)
        self._settle(attempt, home)
        return attempt

    def _settle(self, attempt: Attempt, home: Home) -> None:
        home.settle(attempt.accepted.result())
        if home.is_stateful:
            self._watch.add_session(home.worker_id, attempt.request.session_id)

    def give_up(self, attempt: Attempt, home: Home) -> None:
        """Nobody waits for this any more: cancel it, also if it is accepted only now."""
        self.spawn(self._take_back(attempt, home))

    def forget(self, attempt: Attempt) -> None:
        """It is over."""
        self._watch.remove(attempt)
        self._port.forget(attempt.reply)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run in the background."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

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
            except (BusError, WorkerLostError) as error:
                deadline_s, advised_s = self._deadline_after(error, request, home)
                if loop.time() - started_s > deadline_s:
                    raise UndeliverableError(f"{error} (waited {deadline_s:g} s)") from error
            await asyncio.sleep(max(advised_s, backoff.next_s()))

    def _deadline_after(
        self, error: BusError | WorkerLostError, request: CallTool, home: Home
    ) -> tuple[float, float]:
        """How long to go on in all after `error`, and how long to wait now; raises what is final."""
        deadlines = self._deadlines
        if isinstance(error, NoResponderError):
            return (deadlines.absent_after_s if home.is_stateful else deadlines.nobody_s), 0.0
        if isinstance(error, CallFailedError) and error.code in PASSING:
            return deadlines.full_s, error.retry_after_s
        may_run_again = self._idempotent.get(request.name, False) and not home.is_stateful
        if isinstance(error, WorkerLostError) and may_run_again:
            return deadlines.nobody_s, 0.0
        if isinstance(error, CallFailedError):
            raise UndeliverableError(str(error)) from error
        raise error

    async def _offer(self, request: CallTool, home: Home) -> Attempt:
        """Send the call once: to the session's worker, the run's own workers, or everybody's."""
        if home.is_stateful:
            if self._watch.is_lost(home.worker_id):
                raise WorkerLostError(f"worker {home.worker_id}, which had the session, died")
            return await self._send(request, subjects.tool_worker(home.worker_id), home)
        now_s = asyncio.get_running_loop().time()
        known, until_s = self._scopes.pop(request.name, ("", 0.0))
        if request.run and now_s >= until_s:
            try:
                attempt = await self._send(request, subjects.tool(request.name, request.run), home)
            except NoResponderError:
                known = ""
            else:
                self._scopes[request.name] = (request.run, now_s + SCOPE_LIFE_S)
                return attempt
        attempt = await self._send(request, subjects.tool(request.name, known), home)
        self._scopes[request.name] = (known, max(until_s, now_s + SCOPE_LIFE_S))
        return attempt

    async def _send(self, request: CallTool, subject: str, home: Home) -> Attempt:
        attempt = Attempt(request, subject)
        attempt.reply = self._port.expect(attempt.receive)
        try:
            await self._port.send(subject, request, attempt.reply)
            async with asyncio.timeout(self._deadlines.accept_s):
                accepted = await asyncio.shield(attempt.accepted)
        except asyncio.CancelledError:
            self.give_up(attempt, home)
            raise
        except TimeoutError as error:
            self.give_up(attempt, home)
            within = f"within {self._deadlines.accept_s:g} s"
            raise WorkerLostError(f"no worker accepted the call {within}; it may have run") from error
        except (BusError, WorkerLostError):
            self._port.forget(attempt.reply)
            raise
        self._idempotent[request.name] = accepted.is_idempotent
        self._watch.add(attempt)
        return attempt

    async def _take_back(self, attempt: Attempt, home: Home) -> None:
        try:
            async with asyncio.timeout(LATE_ACCEPT_S):
                accepted = await asyncio.shield(attempt.accepted)
            if accepted.worker_id:
                await self._call_off(attempt, accepted, home)
        except (TimeoutError, BusError, WorkerLostError) as error:
            log.info("call given up", tool=attempt.request.name, reason=str(error))
        finally:
            self._port.forget(attempt.reply)

    async def _call_off(self, attempt: Attempt, accepted: ToolAccepted, home: Home) -> None:
        """Cancel a call; the object that it made is the session's, or nobody's."""
        own = subjects.tool_worker(accepted.worker_id)
        await self._port.send(own, CancelTools((attempt.request.call_id,)))
        if not accepted.is_stateful or home.worker_id == accepted.worker_id:
            return
        if home.is_settled or home.is_released:
            await self._port.send(own, ReleaseToolSession(attempt.request.session_id))
        else:
            self._settle(attempt, home)
