"""A session in this loop, whose process the test plays: when the time of a call begins."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Any

from tailrace_sandbox.adapters.pipes import Output
from tailrace_sandbox.adapters.session import PythonSession
from tailrace_sandbox.adapters.zygote import ZygoteEnded
from tailrace_sandbox.core.limits import Limits
from tailrace_sandbox.engine import files
from tailrace_sandbox.engine.session import HEADER
from tailrace_sandbox.ports import Work

SLOW_START_S = 0.05


class SlowProcess:
    """A zygote whose session starts slowly and answers its first call with exit code 7."""

    is_lost = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def start_call(
        self,
        mode: str,
        payload: Any,
        stdin: str,
        limits: Limits,
        outputs: tuple[Output, ...],
        **how: Any,
    ) -> None:
        for output in outputs:
            output.close_write_end()
        self._channel = socket.socket(fileno=os.dup(how["channel"]))
        self.told.append("start")
        self._playing = asyncio.create_task(self._play())

    async def _play(self) -> None:
        reader, writer = await asyncio.open_connection(sock=self._channel)
        await asyncio.sleep(SLOW_START_S)
        self.told.append("is ready")
        writer.write(HEADER.pack(0))
        await reader.readexactly(HEADER.unpack(await reader.readexactly(HEADER.size))[0])
        answer = files.collect(7, [], 0)
        writer.write(HEADER.pack(len(answer)) + answer)
        await writer.drain()
        writer.close()

    def tell(self, **message: Any) -> None:
        self.told.append(message["op"])

    async def ended(self, timeout_s: float) -> ZygoteEnded:
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        await self._playing


async def test_the_start_of_a_session_takes_no_time_of_its_first_call() -> None:
    zygote = SlowProcess()
    session = PythonSession(zygote, Limits(), 1000, zygote.close)  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        outcome = await session.execute(Work("session", "1", 60.0))
    assert outcome.exit_code == 7
    assert zygote.told == ["start", "is ready", "resume", "pause"]
    await session.close()
