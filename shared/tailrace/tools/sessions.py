"""Objects of stateful tools: one per episode and tool, made once, released once.

Invariants: `create` has ended before the first `execute`; one `execute` at a time, in the order of the
calls; `release` runs exactly once for every object whose `create` was begun, after its last `execute`
was over or cancelled.
"""

from __future__ import annotations

import asyncio
from typing import Any

from tailrace.foreign import ForeignCodeError
from tailrace.log import get_logger
from tailrace.sdk.tool import Tool, ToolOffer, ToolSession
from tailrace.tools import metrics
from tailrace.tools.running import Runner, ToolTimeoutError

log = get_logger(__name__)

RELEASE_TIMEOUT_S = 10.0


class SessionFailedError(Exception):
    """There is no object to call: it was never made, or is gone. The text says why."""


class SessionTool:
    """One tool object of one episode."""

    def __init__(self, offer: ToolOffer, session: ToolSession, runner: Runner) -> None:
        self.session = session
        self._spec = offer.spec
        self._runner = runner
        self._turn = asyncio.Lock()
        self._tool: Tool | None = None
        self._is_released = False
        self._creating = asyncio.create_task(self._create(offer), name=f"create {offer.spec.name}")
        metrics.SESSIONS.inc()

    async def execute(self, arguments: dict[str, Any], timeout_s: float) -> Any:
        """One call; raises `SessionFailedError`, `ForeignCodeError`, `ToolTimeoutError`."""
        await asyncio.wait({self._creating})
        if not self._creating.cancelled() and self._creating.result():
            raise SessionFailedError(self._creating.result())
        async with self._turn:
            tool = self._tool
            if tool is None or self._is_released:
                raise SessionFailedError(f"the session of {self._spec.name} was released")
            return await self._runner.call(self._spec.name, lambda: tool.execute(arguments), timeout_s)

    async def release(self) -> None:
        """Release once; cancel the calls first."""
        if self._is_released:
            return
        self._is_released = True
        metrics.SESSIONS.dec()
        self._creating.cancel()
        await asyncio.wait({self._creating})
        async with self._turn:
            tool, self._tool = self._tool, None
            if tool is None:
                return
            try:
                await self._runner.call(self._spec.name, tool.release, RELEASE_TIMEOUT_S)
            except (ForeignCodeError, ToolTimeoutError) as error:
                log.error(
                    "release failed",
                    tool=self._spec.name,
                    episode_id=self.session.episode_id,
                    reason=str(error),
                )

    async def _create(self, offer: ToolOffer) -> str:
        """Why there is no object; empty if there is one."""
        name = self._spec.name

        async def create() -> None:
            self._tool = offer()
            await self._tool.create(self.session)

        try:
            await self._runner.call(name, create, self._spec.timeout_s)
        except (ForeignCodeError, ToolTimeoutError) as error:
            log.error("create failed", tool=name, episode_id=self.session.episode_id, reason=str(error))
            return f"{name}.create failed: {error}"
        return ""
