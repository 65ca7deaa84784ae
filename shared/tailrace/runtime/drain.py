"""How work ends: in its own time until told to hurry, then cancelled, then left behind with a word.

Every actor drains with the same `hurry` event, which is set when the drain's time is over or a
second signal comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from tailrace.log import get_logger

log = get_logger(__name__)

CANCEL_TIMEOUT_S = 5.0


async def finish(tasks: Iterable[asyncio.Task[Any]], hurry: asyncio.Event) -> None:
    """Wait until `tasks` are done or `hurry` is set; cancel what is left and wait for that."""
    pending = {task for task in tasks if not task.done()}
    if pending:
        all_done = asyncio.create_task(asyncio.wait(pending))
        hurrying = asyncio.create_task(hurry.wait())
        await asyncio.wait({all_done, hurrying}, return_when=asyncio.FIRST_COMPLETED)
        all_done.cancel()
        hurrying.cancel()
        await cancel(task for task in pending if not task.done())


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel and wait; a task that ignores it is logged and left to the end of the process."""
    pending = set(tasks)
    for task in pending:
        task.cancel()
    if pending:
        _, stuck = await asyncio.wait(pending, timeout=CANCEL_TIMEOUT_S)
        for task in stuck:
            log.error("task ignores cancellation", task=task.get_name())
