"""Workflows in the agents' own event loop: many at once, with one HTTP client."""

import asyncio
import copy
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tailrace.log import get_logger
from tailrace.runtime.watchdog import LoopBlockedError, LoopWatchdog
from tailrace.sdk.http import make_http_client
from tailrace.sdk.workflow import Workflow, WorkflowEnd, run_to_end
from tailrace_agents.config import WorkflowArgs
from tailrace_protos.episode import Outcome
from tailrace_protos.session import SessionOpened

log = get_logger(__name__)

_CANCEL_GRACE_S = 5.0


class InlineRunner:
    """`WorkflowRunner` and `Seat` in one: there is always room."""

    def __init__(self, workflow: Workflow, args: WorkflowArgs) -> None:
        self._workflow = workflow
        self._args = args
        self._http_client = make_http_client(args.http_library)
        self._watchdog = LoopWatchdog(
            args.max_blocked_s,
            (run_to_end.__code__,),
            f"the workflow {args.agent} computes or waits in a blocking call: set agents.workflow.mode "
            "to subproc, or use async calls",
        )

    async def start(self) -> None:
        """Watch over the event loop."""
        self._watchdog.start()

    async def close(self) -> None:
        """Close the connections that workflows used."""
        self._watchdog.stop()
        await self._http_client.aclose()

    @asynccontextmanager
    async def seat(self) -> "AsyncIterator[InlineRunner]":
        """See `WorkflowRunner`."""
        yield self

    async def run(self, data: dict[str, Any], access: SessionOpened, timeout_s: float) -> WorkflowEnd:
        """See `Seat`."""
        task = asyncio.create_task(self._run(copy.deepcopy(data), access))
        try:
            await asyncio.wait({task}, timeout=timeout_s)
            in_time = task.done()
        finally:
            if not task.done():
                await self._cancel(task)
        if not in_time:
            return WorkflowEnd(Outcome.TIMEOUT, f"the workflow took more than {timeout_s:g} s")
        if task.cancelled():
            return WorkflowEnd(Outcome.INFRA_FAILURE, "the workflow cancelled itself")
        return task.result()

    async def _run(self, data: dict[str, Any], access: SessionOpened) -> WorkflowEnd:
        offered = {
            "base_url": access.base_url,
            "api_key": access.api_key,
            "http_client": self._http_client,
        }
        try:
            return await run_to_end(self._workflow, data, offered)
        except LoopBlockedError:
            reason = f"the workflow held the event loop for more than {self._args.max_blocked_s:g} s"
            return WorkflowEnd(Outcome.TIMEOUT, f"{reason}: set agents.workflow.mode to subproc")

    async def _cancel(self, task: asyncio.Task[WorkflowEnd]) -> None:
        task.cancel()
        await asyncio.wait({task}, timeout=_CANCEL_GRACE_S)
        if not task.done():
            log.error(
                "workflow ignores its cancellation and runs on: it must let CancelledError through",
                workflow=self._args.agent,
            )
