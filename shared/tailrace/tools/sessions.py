"""Objects of stateful tools: one per episode and tool, created once and released once.

Invariants: `create` ends before the first `execute`; one `execute` runs at a time, in the order of the
calls; `release` runs exactly once for each object whose `create` began, after its last `execute` ended
or was cancelled.
"""

import asyncio
from typing import Any

from tailrace.foreign import ForeignCodeError
from tailrace.log import get_logger
from tailrace.sdk.tool import Tool, ToolOffer, ToolSession
from tailrace.tools import metrics
from tailrace.tools.running import ToolRunner, ToolTimeoutError

log = get_logger(__name__)

RELEASE_TIMEOUT_S = 10.0


class ToolSessionError(Exception):
    """The session has no object: it was never created, or is released. The text gives the reason."""


class SessionTool:
    """Tool object of one episode."""

    def __init__(self, offer: ToolOffer, session: ToolSession, runner: ToolRunner) -> None:
        self.session = session
        self._spec = offer.spec
        self._runner = runner
        self._turn = asyncio.Lock()
        self._tool: Tool | None = None
        self._is_released = False
        self._creating = asyncio.create_task(self._create(offer), name=f"create {offer.spec.name}")
        metrics.SESSIONS.inc()

    async def execute(self, arguments: dict[str, Any], timeout_s: float) -> Any:
        """Runs one call; raises `ToolSessionError`, `ForeignCodeError`, `ToolTimeoutError`."""
        await asyncio.wait({self._creating})
        if not self._creating.cancelled() and self._creating.result():
            raise ToolSessionError(self._creating.result())
        async with self._turn:
            tool = self._tool
            if tool is None or self._is_released:
                raise ToolSessionError(f"the session of {self._spec.name} was released")
            return await self._runner.call(self._spec.name, lambda: tool.execute(arguments), timeout_s)

    async def release(self) -> None:
        """Releases the object once; the calls must be cancelled before."""
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
        """Creates the object; returns the reason of a failure, or an empty string."""
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
