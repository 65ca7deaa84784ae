"""Calls at workers that take no probes: only time limits the wait for their results."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tailrace.tools.client import ToolClient
from tailrace.tools.port import CallAttempt
from tailrace_protos.tool import CallTool, ToolAccepted, ToolResult


@pytest.mark.parametrize("num_ticks", range(3))
async def test_a_cancelled_call_ends_so_although_its_result_comes_at_that_time(num_ticks: int) -> None:
    nowhere: Any = None
    attempt = CallAttempt(CallTool("c", "t"), "subject")
    attempt.accepted.set_result(ToolAccepted("c"))
    waiting = asyncio.create_task(ToolClient(nowhere, "run")._result(attempt))
    await asyncio.sleep(0)
    attempt.result.set_result(ToolResult("c", "t", "late"))
    for _ in range(num_ticks):
        await asyncio.sleep(0)
    came_first = waiting.done()
    waiting.cancel()
    await asyncio.wait({waiting})
    assert waiting.cancelled() != came_first
