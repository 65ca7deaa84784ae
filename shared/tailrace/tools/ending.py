"""Ends what nobody wants any more: cancelled calls, released sessions, and those of silent callers.

Invariants: a session's calls end before its objects are released; nobody is taken for silent while
this worker itself is cut off from NATS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from tailrace.log import get_logger
from tailrace.tools import metrics
from tailrace.tools.calls import Calls
from tailrace.tools.host import ToolHost

log = get_logger(__name__)

SWEEP_S = 0.25

Spawn = Callable[[Awaitable[Any], str], object]


class Ending:
    """Ends the calls and sessions of one worker; `spawn` runs work beside the caller."""

    def __init__(
        self, calls: Calls, host: ToolHost, is_connected: Callable[[], bool], spawn: Spawn
    ) -> None:
        self._calls = calls
        self._host = host
        self._is_connected = is_connected
        self._spawn = spawn

    def cancel(self, call_id: str) -> None:
        """End a call without an answer, if it runs here."""
        call = self._calls.running.get(call_id)
        if call is not None:
            call.cancel()

    async def end_session(self, session_id: str) -> None:
        """Cancel the session's calls, then release its objects."""
        calls = self._calls.of_session(session_id)
        for call in calls:
            call.cancel()
        tasks = {call.task for call in calls if call.task is not None}
        if tasks:
            await asyncio.wait(tasks)
        self._calls.session_leases.end(session_id)
        await self._host.release(session_id)

    async def sweep(self) -> None:
        """End what belongs to callers that fell silent, for ever."""
        while True:
            await asyncio.sleep(SWEEP_S)
            if self._is_connected():
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
