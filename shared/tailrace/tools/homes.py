"""Where the calls of sessions go: the first call of a session and tool settles it for the others."""

from __future__ import annotations

import asyncio

from tailrace_protos.tool import CallTool, ToolAccepted


class Home:
    """One session's dealings with one tool."""

    def __init__(self) -> None:
        self.opening = asyncio.Lock()  # held until the first call is accepted
        self.is_settled = False
        self.worker_id = ""  # who has the tool's object; empty if the tool has no state
        self.is_released = False

    @property
    def is_stateful(self) -> bool:
        """Whether all calls must go to `worker_id`."""
        return bool(self.worker_id)

    def settle(self, accepted: ToolAccepted) -> None:
        """The first call was accepted."""
        self.is_settled = True
        self.worker_id = accepted.worker_id if accepted.is_stateful else ""


class Homes:
    """All sessions of this process."""

    def __init__(self) -> None:
        self._homes: dict[str, dict[str, Home]] = {}  # session id -> tool -> home

    def of(self, request: CallTool) -> Home:
        """Where a call goes."""
        if not request.session_id:
            return Home()
        return self._homes.setdefault(request.session_id, {}).setdefault(request.name, Home())

    def forget(self, session_id: str) -> set[str]:
        """Forget a session; the workers that have objects of it."""
        homes = self._homes.pop(session_id, {})
        for home in homes.values():
            home.is_released = True
        return {home.worker_id for home in homes.values() if home.is_stateful}
