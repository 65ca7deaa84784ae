"""Follow a run from outside: status messages until it has finished or cannot go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tailrace.bus import Bus
from tailrace.config import Endpoints
from tailrace_cli.cluster.supervisor import ServiceFailedError
from tailrace_protos import subjects
from tailrace_protos.control import RunStatus

FINISHED = "finished"


async def watch(
    endpoints: Endpoints,
    run: str,
    show: Callable[[RunStatus], None],
    failed: asyncio.Future[ServiceFailedError],
    interrupted: asyncio.Event,
) -> RunStatus | None:
    """Show every status until the run is finished (its last status) or interrupted (None).

    Raises `ServiceFailedError` when the cluster cannot go on.
    """
    finished: asyncio.Future[RunStatus] = asyncio.get_running_loop().create_future()

    async def on_status(status: RunStatus) -> None:
        show(status)
        if status.phase == FINISHED and not finished.done():
            finished.set_result(status)

    bus = await Bus.connect(endpoints, name="cli")
    interruption = asyncio.create_task(interrupted.wait())
    try:
        await bus.subscribe(subjects.run_status(run), RunStatus, on_status)
        ends: set[asyncio.Future[Any]] = {finished, failed, interruption}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        interruption.cancel()
        await bus.close()
    if failed.done():
        raise failed.result()
    return finished.result() if finished.done() else None
