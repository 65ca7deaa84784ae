"""`WorkerWatch`: detects within seconds that a worker died, and renews leases at workers.

One probe per second and worker carries the ids of all calls and sessions of this process there.
Invariants: no worker is declared lost while this process is disconnected from NATS, or for the time in
which this process stood still; it requests again the result of a call that a worker has finished and
whose result never arrived.
"""

import asyncio
from collections.abc import Iterable

import msgspec

from tailrace.bus import BusClosedError, CallFailedError, CallTimeoutError, NoResponderError
from tailrace.log import get_logger
from tailrace.tools import metrics
from tailrace.tools.port import CallAttempt, ToolPort, WorkerLostError
from tailrace_protos import subjects
from tailrace_protos.base import MalformedMessageError
from tailrace_protos.tool import ProbeTools, ToolsProbed

log = get_logger(__name__)

_MAX_IDS = 4096  # in one probe
_MOST_OF_A_ROUND = 4.0  # probe times: one until the probe, two for its answer
_MISSES = 2  # a result may be in flight during a probe


class ToolDeadlines(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of a caller of tools."""

    probe_s: float = 1.0  # between two probes of a worker
    absent_after_s: float = 3.0  # a worker that NATS does not know for this time is dead
    silent_after_s: float = 10.0  # a connected worker that does not answer for this time is dead
    lease_s: float = (
        15.0  # without probes for this time a worker ends the calls and sessions of a caller
    )
    accept_s: float = 10.0  # for a call to be accepted or refused
    nobody_s: float = 30.0  # for a worker to appear
    full_s: float = 600.0  # for a full worker to take the call
    unprobed_s: float = 600.0  # for the result of a worker that takes no probes


class WorkerWatch:
    """Watch over the workers with calls or sessions of this process."""

    def __init__(self, port: ToolPort, deadlines: ToolDeadlines) -> None:
        self._port = port
        self._deadlines = deadlines
        self._attempts: dict[str, dict[str, CallAttempt]] = {}  # worker id -> call id -> attempt
        self._sessions: dict[str, set[str]] = {}  # worker id -> session ids
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._lost: set[tuple[str, str]] = set()  # worker id, session id

    def add(self, attempt: CallAttempt) -> None:
        """Watches an accepted call."""
        if attempt.worker_id:
            self._attempts.setdefault(attempt.worker_id, {})[attempt.request.call_id] = attempt
            self._begin(attempt.worker_id)

    def remove(self, attempt: CallAttempt) -> None:
        """Removes a call that has ended."""
        self._attempts.get(attempt.worker_id, {}).pop(attempt.request.call_id, None)

    def add_session(self, worker_id: str, session_id: str) -> None:
        """Renews the lease of a session."""
        self._sessions.setdefault(worker_id, set()).add(session_id)
        self._begin(worker_id)

    def remove_session(self, worker_id: str, session_id: str) -> None:
        """Removes a released session."""
        self._sessions.get(worker_id, set()).discard(session_id)
        self._lost.discard((worker_id, session_id))

    def is_lost(self, worker_id: str, session_id: str) -> bool:
        """True if the worker was declared dead while it had the session.

        A worker that comes back serves later sessions.
        """
        return (worker_id, session_id) in self._lost

    async def close(self) -> None:
        """Stops the watch."""
        watching = set(self._watching.values())
        for task in watching:
            task.cancel()
        if watching:
            await asyncio.wait(watching)

    def _begin(self, worker_id: str) -> None:
        if worker_id not in self._watching:
            task = asyncio.create_task(self._watch(worker_id), name=f"watch {worker_id}")
            self._watching[worker_id] = task

    async def _watch(self, worker_id: str) -> None:
        try:
            await self._watch_while_needed(worker_id)
        finally:
            del self._watching[worker_id]  # before another task can add a call

    async def _watch_while_needed(self, worker_id: str) -> None:
        loop = asyncio.get_running_loop()
        silent_s, looked_s = 0.0, loop.time()
        while self._attempts.get(worker_id) or self._sessions.get(worker_id):
            await asyncio.sleep(self._deadlines.probe_s)
            if not self._port.bus.connection.is_connected:
                silent_s, looked_s = 0.0, loop.time()
                continue
            deadline_s, reason = await self._probe(worker_id)
            round_s = min(loop.time() - looked_s, _MOST_OF_A_ROUND * self._deadlines.probe_s)
            silent_s, looked_s = (silent_s + round_s if reason else 0.0), loop.time()
            if silent_s > deadline_s:
                self._declare_lost(worker_id, reason)
                return

    async def _probe(self, worker_id: str) -> tuple[float, str]:
        """Probes a worker; returns the time limit and the reason of a failure (empty: none)."""
        calls, sessions = (
            list(self._attempts.get(worker_id, ())),
            list(self._sessions.get(worker_id, ())),
        )
        try:
            for start in range(0, max(len(calls), len(sessions), 1), _MAX_IDS):
                part = slice(start, start + _MAX_IDS)
                probe = ProbeTools(tuple(calls[part]), tuple(sessions[part]))
                answer = await self._port.ask(
                    subjects.tool_worker(worker_id), probe, ToolsProbed, self._deadlines.probe_s * 2
                )
                await self._compare(worker_id, probe.call_ids, answer)
        except NoResponderError:
            return self._deadlines.absent_after_s, "it is not connected"
        except (CallTimeoutError, CallFailedError, MalformedMessageError, BusClosedError) as error:
            return self._deadlines.silent_after_s, f"it answers no probe ({error})"
        return 0.0, ""

    async def _compare(self, worker_id: str, asked: Iterable[str], answer: ToolsProbed) -> None:
        running, finished = set(answer.running), set(answer.finished)
        for call_id in asked:
            attempt = self._attempts.get(worker_id, {}).get(call_id)
            if attempt is None:
                continue
            attempt.num_missed = 0 if call_id in running else attempt.num_missed + 1
            if attempt.num_missed < _MISSES:
                continue
            if call_id in finished:
                await self._port.send(subjects.tool_worker(worker_id), attempt.request, attempt.reply)
            else:
                attempt.fail(WorkerLostError(f"worker {worker_id} does not know the call any more"))

    def _declare_lost(self, worker_id: str, reason: str) -> None:
        log.warning("tool worker lost", worker_id=worker_id, reason=reason)
        metrics.LOST_WORKERS.inc()
        self._lost |= {(worker_id, session) for session in self._sessions.pop(worker_id, ())}
        for attempt in self._attempts.pop(worker_id, {}).values():
            attempt.fail(WorkerLostError(f"worker {worker_id} died: {reason}"))
