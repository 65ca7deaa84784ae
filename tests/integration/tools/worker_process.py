"""A tool worker as a process that a test may kill: `python worker_process.py NATS_URL RUN`."""

from __future__ import annotations

import asyncio
import os
import sys

from tailrace import log
from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.sdk.tool import tool
from tailrace.tools import ToolWorker


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


@tool
async def stuck() -> str:
    """Never answer."""
    tell("stuck")
    await asyncio.Event().wait()
    return ""


@tool(is_idempotent=True)
async def repeatable() -> str:
    """Answer if this is not the first worker that was asked; the test kills that one."""
    tell("repeatable")
    await asyncio.sleep(2.0)
    return f"by {os.getpid()}"


async def main(nats_url: str, run: str) -> None:
    log.configure(service="tools")  # to standard error
    endpoints = Endpoints(nats_url=nats_url, redis_url="redis://unused", host_id="test")
    bus = await Bus.connect(endpoints, name="worker")
    await ToolWorker([stuck, repeatable], bus, run=run).start()
    tell("ready")
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
