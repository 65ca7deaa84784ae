"""Sleep of an engine while the learner has the device that both use (`colocated: true`).

Invariants: the engine has device memory only during the server's turn; calls are held with their tokens
while it sleeps, and go on afterwards; no weights are staged or swapped meanwhile (`awake`).
"""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from tailrace.device_turn import DeviceTurn
from tailrace.log import get_logger
from tailrace.runtime import StopService
from tailrace_inference import metrics
from tailrace_inference.ports import Engine, EngineFailedError

log = get_logger(__name__)


class Sleeper:
    """Turns of one server, after the first one, which begins before its engine."""

    def __init__(self, engine: Engine, turn: DeviceTurn) -> None:
        self._engine = engine
        self._turn = turn
        self._busy = asyncio.Lock()

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Waits until the engine is awake and keeps it so inside."""
        async with self._busy:
            yield

    async def run(self) -> NoReturn:
        """Gives the device to the learner whenever it waits for it."""
        while True:
            await self._turn.wanted()
            try:
                async with self._busy:
                    slept_s = await self._sleep()
            except EngineFailedError as error:  # it holds all calls, and cannot go on with them
                raise StopService(1, str(error)) from error
            metrics.SLEEP_SECONDS.observe(slept_s)
            log.info("woke up", slept_s=round(slept_s, 3))

    async def _sleep(self) -> float:
        """Lets the learner have its turn; returns the seconds without the device."""
        began_s = time.perf_counter()
        await self._engine.pause()
        await self._engine.sleep()
        self._turn.give()
        await self._turn.take()
        await self._engine.wake()
        await self._engine.resume()
        return time.perf_counter() - began_s
