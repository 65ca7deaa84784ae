"""The calls of one worker: which run, who waits for them, which are over, whose callers are alive.

Invariant: a call id is in exactly one state: running, finished (for a while), or unknown.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from tailrace.tools.finished import FinishedCalls
from tailrace.tools.leases import Leases
from tailrace.tools.replies import ReplyTo
from tailrace_protos.tool import CallTool, ProbeTools, ToolResult, ToolsProbed


@dataclass
class RunningCall:
    """A call that was accepted and is not over."""

    request: CallTool
    replies: list[ReplyTo] = field(default_factory=list)
    task: asyncio.Task[Any] | None = None

    def cancel(self) -> None:
        """Nobody wants it any more."""
        if self.task is not None:
            self.task.cancel()


class Calls:
    """All calls of a worker, by id, and the leases of calls and sessions."""

    def __init__(self) -> None:
        self.running: dict[str, RunningCall] = {}
        self.call_leases = Leases()
        self.session_leases = Leases()
        self._finished = FinishedCalls()

    def begin(self, request: CallTool, to: ReplyTo) -> RunningCall:
        """A new call."""
        self.call_leases.begin(request.call_id, request.lease_s, _now_s())
        call = self.running[request.call_id] = RunningCall(request, [to])
        return call

    def end(self, call_id: str) -> None:
        """The call does not run any more."""
        self.running.pop(call_id, None)
        self.call_leases.end(call_id)

    def finish(self, result: ToolResult) -> None:
        """Remember a result for callers that missed it."""
        self._finished.add(result, _now_s())

    def finished(self, call_id: str) -> ToolResult | None:
        """The result of a call that is over, while it is remembered."""
        return self._finished.get(call_id)

    def of_session(self, session_id: str) -> list[RunningCall]:
        """Running calls of a session."""
        return [call for call in self.running.values() if call.request.session_id == session_id]

    def probed(self, probe: ProbeTools, alive: set[str]) -> ToolsProbed:
        """Answer a probe; `alive` sessions. Whoever probes is alive."""
        now_s = _now_s()
        self.call_leases.renew(probe.call_ids, now_s)
        self.session_leases.renew(probe.session_ids, now_s)
        return ToolsProbed(
            tuple(call_id for call_id in probe.call_ids if call_id in self.running),
            tuple(call_id for call_id in probe.call_ids if self._finished.get(call_id)),
            tuple(session_id for session_id in probe.session_ids if session_id in alive),
        )

    def renew_all(self) -> None:
        """We were cut off and could hear nobody."""
        self.call_leases.renew_all(_now_s())
        self.session_leases.renew_all(_now_s())

    def expired(self) -> tuple[list[str], list[str]]:
        """Calls and sessions whose callers fell silent; each is told once."""
        now_s = _now_s()
        calls, sessions = self.call_leases.expired(now_s), self.session_leases.expired(now_s)
        for call_id in calls:
            self.call_leases.end(call_id)
        for session_id in sessions:
            self.session_leases.end(session_id)
        return calls, sessions


def _now_s() -> float:
    return asyncio.get_running_loop().time()
