"""A pool of child processes.

Invariants: a process is lent to one caller at a time; one that was not given back in good order (an
error, a cancelled caller, an answer still missing) is killed and replaced, so that the next caller
meets a fresh one; nothing here blocks the event loop.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from tailrace.processes.worker import WorkerProcess


class ProcessPool:
    """At most `num_processes` processes `python -m module`; they come with use.

    `ready` sees each new process before its first caller; a process that it raises for is ended.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        num_processes: int,
        ready: Callable[[WorkerProcess], Awaitable[None]],
        python: str = sys.executable,
    ) -> None:
        self._module = module
        self._arguments = arguments
        self._ready = ready
        self._python = python
        self._idle: asyncio.Queue[WorkerProcess | None] = asyncio.Queue()  # None: a place to fill
        self._all: set[WorkerProcess] = set()
        self._ending: set[asyncio.Task[int]] = set()
        for _ in range(num_processes):
            self._idle.put_nowait(None)

    async def open(self) -> None:
        """Start the first process now, to see whether it can; raises what `ready` raises, and
        `ProcessStartError`."""
        try:
            async with self.lend():
                pass
        finally:
            await asyncio.gather(*self._ending)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[WorkerProcess]:
        """A process for the body of the `with`; waits while all are busy."""
        process = await self._idle.get()
        in_order = False
        try:
            if process is None:
                process = await WorkerProcess.start(self._module, self._arguments, self._python)
                self._all.add(process)
                await self._ready(process)
            yield process
            in_order = process.is_usable
        finally:
            if process is not None and not in_order:
                self._discard(process)
            self._idle.put_nowait(process if in_order else None)

    async def close(self) -> None:
        """Kill all processes."""
        for process in list(self._all):
            self._discard(process)
        await asyncio.gather(*self._ending)

    def _discard(self, process: WorkerProcess) -> None:
        self._all.discard(process)
        process.kill()
        ending = asyncio.create_task(process.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
