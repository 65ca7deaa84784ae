"""One child process and its pipes, seen from the parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from tailrace.processes.frames import HEADER, frame

_EXIT_TIMEOUT_S = 1.0

R = TypeVar("R")


class ProcessStartError(Exception):
    """There is no such interpreter, or no room for one more process."""


class WorkerProcess:
    """A child that answers every message with one, in order.

    `is_usable` is False from a message on until its answer is here, whatever becomes of who waits.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_usable = True

    @classmethod
    async def start(
        cls, module: str, arguments: Sequence[str] = (), python: str = sys.executable
    ) -> WorkerProcess:
        """Run `python -m module`, which opens a `ParentLink`; in a session of its own.

        Raises `ProcessStartError`.
        """
        pipe = asyncio.subprocess.PIPE
        try:
            process = await asyncio.create_subprocess_exec(
                python,
                "-m",
                module,
                *arguments,
                stdin=pipe,
                stdout=pipe,
                start_new_session=True,  # so that `end` reaches what user code may have started
            )
        except OSError as error:
            raise ProcessStartError(f"cannot start {python}: {error.strerror}") from error
        return cls(process)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    async def exchange(self, message: object, reply_type: type[R]) -> R:
        """Send a message and read its answer; raises `EOFError` when the process dies."""
        stdin = self._process.stdin
        assert stdin is not None
        self.is_usable = False
        try:
            stdin.write(frame(message))
            await stdin.drain()
        except ConnectionError as error:
            raise EOFError from error
        reply = await self.read(reply_type)
        self.is_usable = True
        return reply

    async def read(self, reply_type: type[R]) -> R:
        """The next message it sends; raises `EOFError` when it dies instead."""
        stdout = self._process.stdout
        assert stdout is not None
        header = await stdout.readexactly(HEADER.size)  # IncompleteReadError is an EOFError
        data = await stdout.readexactly(HEADER.unpack(header)[0])
        return msgspec.msgpack.decode(data, type=reply_type)

    def kill(self) -> None:
        """Kill it, whatever it does, with all that it started, also if it has ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> int:
        """Kill it and wait until it is gone; its exit code."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.kill()
        return await self._process.wait()

    async def exit_code(self) -> int:
        """Of a process that closed its pipes; negative: the signal that ended it."""
        try:
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                return await self._process.wait()
        except TimeoutError:
            return await self.end()
