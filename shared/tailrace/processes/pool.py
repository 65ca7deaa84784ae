"""Child processes with pipes, and a pool of them.

Invariants: each process serves one caller at a time; a process with an error, a cancelled caller or a
missing answer is killed and replaced, so that the next caller gets a new one, also where a process
ended unused; no call blocks the event loop.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import IO, TypeVar

import msgspec

from tailrace.import_path import module_options
from tailrace.processes.child import HEADER, frame

_EXIT_TIMEOUT_S = 1.0
_CREDENTIALS = ("TAILRACE_NATS_", "TAILRACE_REDIS_", "TAILRACE_GATEWAY_ADMIN_KEY")

R = TypeVar("R")


class ProcessStartError(Exception):
    """The interpreter does not exist, or the system allows no more processes."""


def _without_credentials() -> dict[str, str]:
    """Our environment aside from addresses and keys of the servers, which user code does not need."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_CREDENTIALS)}


class WorkerProcess:
    """Child process that answers each message with one message, in order.

    `is_usable` is False from a message to its answer, also when the caller is cancelled.
    """

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.is_usable = True

    @classmethod
    async def start(
        cls,
        module: str,
        arguments: Sequence[str] = (),
        python: str = sys.executable,
        *,
        environment: Mapping[str, str] | None = None,
        errors: IO[bytes] | None = None,
    ) -> "WorkerProcess":
        """Runs `python -m module`, which opens a `ParentLink`, in a new process session.

        `environment` replaces ours without its credentials, `errors` our standard error. Raises
        `ProcessStartError`.
        """
        pipe = asyncio.subprocess.PIPE
        given = _without_credentials() if environment is None else environment
        try:
            process = await asyncio.create_subprocess_exec(
                python,
                *module_options(given),
                module,
                *arguments,
                stdin=pipe,
                stdout=pipe,
                stderr=errors,
                env=given,
                start_new_session=True,  # `kill` also reaches processes that user code started
            )
        except OSError as error:
            raise ProcessStartError(f"cannot start {python}: {error.strerror}") from error
        return cls(process)

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        """True once its end is known."""
        return self._process.returncode is not None

    async def exchange(self, message: object, reply_type: type[R]) -> R:
        """Sends a message and reads its answer; raises `EOFError` when the process dies."""
        stdin = self._process.stdin
        assert stdin is not None
        self.is_usable = False
        if stdin.is_closing():  # uvloop raises RuntimeError for a write
            raise EOFError
        try:
            stdin.write(frame(message))
            await stdin.drain()
        except ConnectionError as error:
            raise EOFError from error
        reply = await self.read(reply_type)
        self.is_usable = True
        return reply

    async def read(self, reply_type: type[R]) -> R:
        """Reads the next message; raises `EOFError` when the process dies."""
        stdout = self._process.stdout
        assert stdout is not None
        header = await stdout.readexactly(HEADER.size)  # IncompleteReadError is an EOFError
        data = await stdout.readexactly(HEADER.unpack(header)[0])
        return msgspec.msgpack.decode(data, type=reply_type)

    def kill(self) -> None:
        """Kills the process and its children, also children that outlive it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def end(self) -> int:
        """Kills the process, waits for its end and returns its exit code."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.kill()
        return await self._process.wait()

    async def exit_code(self) -> int:
        """Returns the exit code after the pipes closed; negative: the signal that ended the process."""
        try:
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                return await self._process.wait()
        except TimeoutError:
            return await self.end()


class ProcessPool:
    """Pool of at most `num_processes` processes `python -m module`, started on demand.

    `ready` prepares each new process; if it raises, the process is killed.
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
        # None: a free place. What came back last goes first, so that few processes serve few callers.
        self._idle: asyncio.LifoQueue[WorkerProcess | None] = asyncio.LifoQueue()
        self._all: set[WorkerProcess] = set()
        self._ending: set[asyncio.Task[int]] = set()
        for _ in range(num_processes):
            self._idle.put_nowait(None)

    async def open(self) -> None:
        """Starts the first process as a check; raises `ProcessStartError` and the errors of `ready`."""
        try:
            async with self.lend():
                pass
        finally:
            await asyncio.gather(*self._ending)

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[WorkerProcess]:
        """Lends a process for the body of the `with`; waits while all are busy."""
        process = await self._idle.get()
        if process is not None and process.has_ended:  # while nobody used it
            self._discard(process)
            process = None
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
        """Kills all processes."""
        for process in list(self._all):
            self._discard(process)
        await asyncio.gather(*self._ending)

    def _discard(self, process: WorkerProcess) -> None:
        self._all.discard(process)
        process.kill()
        ending = asyncio.create_task(process.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
