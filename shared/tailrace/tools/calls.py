"""Calls of one worker: running calls, finished calls, leases of callers, cancellation.

Invariants: a call id is in exactly one state: running, finished (for a limited time), or unknown; the
calls of a session end before its objects are released; no lease expires while this worker is
disconnected from NATS.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tailrace.log import get_logger
from tailrace.tools import metrics
from tailrace.tools.host import ToolHost
from tailrace.tools.wire import ReplyTo
from tailrace_protos.tool import CallTool, ProbeTools, ToolResult, ToolsProbed

log = get_logger(__name__)

MAX_AGE_S = 120.0
MAX_RESULTS = 10_000
MAX_BYTES = 64 << 20
SWEEP_S = 0.25
STOOD_STILL_S = 1.0  # beyond `SWEEP_S`: this process was suspended, and heard no caller meanwhile
Spawn = Callable[[Awaitable[Any], str], object]


class Leases:
    """Leases by key: a lease expires when its caller is silent."""

    def __init__(self) -> None:
        self._lease_s: dict[str, float] = {}
        self._heard_s: dict[str, float] = {}

    def begin(self, key: str, lease_s: float, now_s: float) -> None:
        """Begins a lease that its caller renews at least every `lease_s`; 0: no lease."""
        if lease_s > 0:
            self._lease_s[key] = lease_s
            self._heard_s[key] = now_s

    def renew(self, keys: Iterable[str], now_s: float) -> None:
        """Renews the leases of `keys`."""
        for key in keys:
            if key in self._heard_s:
                self._heard_s[key] = now_s

    def renew_all(self, now_s: float) -> None:
        """Renews all leases, after an outage of this worker."""
        self.renew(list(self._heard_s), now_s)

    def postpone(self, by_s: float) -> None:
        """Gives all leases more time: so long this worker could hear nobody."""
        for key in self._heard_s:
            self._heard_s[key] += by_s

    def end(self, key: str) -> None:
        """Ends a lease."""
        self._lease_s.pop(key, None)
        self._heard_s.pop(key, None)

    def expired(self, now_s: float) -> list[str]:
        """Returns the keys of expired leases."""
        return [key for key, heard_s in self._heard_s.items() if now_s - heard_s > self._lease_s[key]]


class FinishedCalls:
    """Results of recent calls: a repeated call gets its result and does not run again.

    Age, number and bytes are limited; the oldest results go first.
    """

    def __init__(self, max_results: int = MAX_RESULTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_results = max_results
        self._max_bytes = max_bytes
        self._results: OrderedDict[str, tuple[float, int, ToolResult]] = OrderedDict()
        self._num_bytes = 0

    def add(self, result: ToolResult, now_s: float) -> None:
        """Stores a result, unless it is larger than the limit of bytes."""
        num_bytes = len(result.content) + 256
        if num_bytes > self._max_bytes or result.call_id in self._results:
            return
        self._results[result.call_id] = (now_s, num_bytes, result)
        self._num_bytes += num_bytes
        while self._is_over(now_s):
            _, (_, freed, _) = self._results.popitem(last=False)
            self._num_bytes -= freed

    def get(self, call_id: str) -> ToolResult | None:
        """Returns the result, if it is still stored."""
        found = self._results.get(call_id)
        return found[2] if found else None

    def _is_over(self, now_s: float) -> bool:
        oldest_s = next(iter(self._results.values()))[0] if self._results else now_s
        is_full = len(self._results) > self._max_results or self._num_bytes > self._max_bytes
        return is_full or now_s - oldest_s > MAX_AGE_S


@dataclass
class RunningCall:
    """Accepted call that has not ended."""

    request: CallTool
    replies: list[ReplyTo] = field(default_factory=list)
    task: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        """Cancels the call."""
        if self.task is not None:
            self.task.cancel()


class WorkerCalls:
    """All calls of a worker by id, and the leases of calls and sessions."""

    def __init__(self) -> None:
        self.running: dict[str, RunningCall] = {}
        self.call_leases = Leases()
        self.session_leases = Leases()
        self._finished = FinishedCalls()

    def begin(self, request: CallTool, to: ReplyTo) -> RunningCall:
        """Adds a new call."""
        self.call_leases.begin(request.call_id, request.lease_s, _now_s())
        call = self.running[request.call_id] = RunningCall(request, [to])
        return call

    def end(self, call_id: str) -> None:
        """Removes a call that has ended."""
        self.running.pop(call_id, None)
        self.call_leases.end(call_id)

    def finish(self, result: ToolResult) -> None:
        """Stores a result for repeated calls."""
        self._finished.add(result, _now_s())

    def finished(self, call_id: str) -> ToolResult | None:
        """Returns the result of a finished call, while it is stored."""
        return self._finished.get(call_id)

    def of_session(self, session_id: str) -> list[RunningCall]:
        """Returns the running calls of a session."""
        return [call for call in self.running.values() if call.request.session_id == session_id]

    def probed(self, probe: ProbeTools, alive: set[str]) -> ToolsProbed:
        """Answers a probe, which renews the leases of its caller; `alive`: sessions with objects."""
        now_s = _now_s()
        self.call_leases.renew(probe.call_ids, now_s)
        self.session_leases.renew(probe.session_ids, now_s)
        return ToolsProbed(
            tuple(call_id for call_id in probe.call_ids if call_id in self.running),
            tuple(call_id for call_id in probe.call_ids if self._finished.get(call_id)),
            tuple(session_id for session_id in probe.session_ids if session_id in alive),
        )

    def renew_all(self) -> None:
        """Renews all leases, after an outage of this worker."""
        self.call_leases.renew_all(_now_s())
        self.session_leases.renew_all(_now_s())

    def postpone(self, by_s: float) -> None:
        """Gives all leases more time: so long this worker stood still."""
        self.call_leases.postpone(by_s)
        self.session_leases.postpone(by_s)

    def expired(self) -> tuple[list[str], list[str]]:
        """Returns calls and sessions whose leases expired, each once."""
        now_s = _now_s()
        calls, sessions = self.call_leases.expired(now_s), self.session_leases.expired(now_s)
        for call_id in calls:
            self.call_leases.end(call_id)
        for session_id in sessions:
            self.session_leases.end(session_id)
        return calls, sessions


def _now_s() -> float:
    return asyncio.get_running_loop().time()


class Cancellation:
    """Cancellation of calls and sessions of one worker; `spawn` runs work in the background."""

    def __init__(
        self, calls: WorkerCalls, host: ToolHost, is_connected: Callable[[], bool], spawn: Spawn
    ) -> None:
        self._calls = calls
        self._host = host
        self._is_connected = is_connected
        self._spawn = spawn

    def cancel(self, call_id: str) -> None:
        """Cancels a call without an answer, if it runs here."""
        call = self._calls.running.get(call_id)
        if call is not None:
            call.cancel()

    async def end_session(self, session_id: str) -> None:
        """Cancels the session's calls, then releases its objects."""
        calls = self._calls.of_session(session_id)
        for call in calls:
            call.cancel()
        tasks = {call.task for call in calls if call.task is not None}
        if tasks:
            await asyncio.wait(tasks)
        self._calls.session_leases.end(session_id)
        await self._host.release(session_id)

    async def sweep(self) -> None:
        """Ends the calls and sessions of silent callers, in an endless loop."""
        while True:
            began_s = _now_s()
            await asyncio.sleep(SWEEP_S)
            late_s = _now_s() - began_s - SWEEP_S
            if late_s > STOOD_STILL_S:
                self._calls.postpone(late_s)
            elif self._is_connected():
                self._end_expired()

    def _end_expired(self) -> None:
        calls, sessions = self._calls.expired()
        for call_id in calls:
            log.warning("caller fell silent", call_id=call_id)
            metrics.EXPIRED.labels("call").inc()
            self.cancel(call_id)
        for session_id in sessions:
            log.warning("caller fell silent", session_id=session_id)
            metrics.EXPIRED.labels("session").inc()
            self._spawn(self.end_session(session_id), "expired session")
