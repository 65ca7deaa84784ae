"""A tool worker in a process of its own: `python -m benchmarks.tools.worker NATS_URL`."""

from __future__ import annotations

import asyncio
import sys
import time

import uvloop

from tailrace import log
from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace.sdk import tool
from tailrace.tools import ToolWorker

CALL_S = 0.05


@tool
def block() -> str:
    """Block a thread, as a database query or an HTTP request of a plain library does."""
    time.sleep(CALL_S)
    return "done"


@tool
async def wait() -> str:
    """Wait without blocking."""
    await asyncio.sleep(CALL_S)
    return "done"


@tool
async def noop() -> str:
    """Do nothing."""
    return ""


TOOLS = (block, wait, noop)


async def main(nats_url: str) -> None:
    """Serve until killed."""
    log.configure(service="tools")
    endpoints = Endpoints(nats_url=nats_url, redis_url="", host_id="bench")
    await ToolWorker(TOOLS, await Bus.connect(endpoints, name="worker")).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1]))
