"""Reward functions in processes of their own, with a timeout that is real.

Invariants: a process runs one call at a time; one that exceeds its time, dies or is abandoned in the
middle of a call is killed and replaced, so that the next call meets a fresh one; nothing here blocks
the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Sequence

import msgspec

from tailrace.log import get_logger
from tailrace_protos.reward import ScoreItem
from tailrace_reward import metrics
from tailrace_reward.adapters.frames import HEADER, Call, Loaded, Returned, frame
from tailrace_reward.ports import FunctionFailedError

log = get_logger(__name__)

_LOAD_TIMEOUT_S = 120.0
_EXIT_TIMEOUT_S = 1.0
_MODULE = "tailrace_reward.adapters.function_process"


class FunctionLoadError(Exception):
    """Functions could not be imported. Attributes: `errors` (reason by `module:name`)."""

    def __init__(self, errors: dict[str, str]) -> None:
        super().__init__("; ".join(errors.values()))
        self.errors = errors


class FunctionProcess:
    """One process and its pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @classmethod
    async def start(cls, functions: Sequence[str]) -> FunctionProcess:
        """Start and import; raises `FunctionLoadError`."""
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULE,
            *functions,
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,  # so that `end` reaches what a function may have started
        )
        started = cls(process)
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                loaded = msgspec.msgpack.decode(await started._read(), type=Loaded)
        except (TimeoutError, EOFError) as error:
            await started.end()
            reason = (
                "ended" if isinstance(error, EOFError) else f"took more than {_LOAD_TIMEOUT_S:.0f} s"
            )
            raise FunctionLoadError(dict.fromkeys(functions, f"importing it {reason}")) from error
        if loaded.errors:
            await started.end()
            raise FunctionLoadError(loaded.errors)
        return started

    async def call(self, call: Call) -> Returned:
        """One call; raises `EOFError` when the process dies."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(frame(call))
            await stdin.drain()
        except ConnectionError as error:
            raise EOFError from error
        return msgspec.msgpack.decode(await self._read(), type=Returned)

    async def end(self) -> int:
        """Kill it, whatever it does, with all that it started; its exit code."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return await self._process.wait()

    async def exit_code(self) -> int:
        """Of a process that closed its pipes."""
        try:
            async with asyncio.timeout(_EXIT_TIMEOUT_S):
                return await self._process.wait()
        except TimeoutError:
            return await self.end()

    async def _read(self) -> bytes:
        stdout = self._process.stdout
        assert stdout is not None
        header = await stdout.readexactly(HEADER.size)  # IncompleteReadError is an EOFError
        return await stdout.readexactly(HEADER.unpack(header)[0])


class ProcessPool:
    """`FunctionRunner` with `num_processes` processes."""

    def __init__(self, functions: Sequence[str], num_processes: int) -> None:
        self._functions = tuple(functions)
        self._num_processes = num_processes
        self._idle: asyncio.Queue[FunctionProcess | None] = asyncio.Queue()  # None: a place to fill
        self._all: set[FunctionProcess] = set()
        self._ending: set[asyncio.Task[int]] = set()

    async def start(self) -> None:
        """Start one process, to see now whether all can be imported; others come with use."""
        self._idle.put_nowait(await self._start_one())
        for _ in range(self._num_processes - 1):
            self._idle.put_nowait(None)

    async def call(self, function: str, item: ScoreItem, timeout_s: float) -> float:
        """See `FunctionRunner`."""
        process = await self._idle.get()
        try:
            if process is None:
                process = await self._start_one()
            returned = await self._call(process, Call(function, item), timeout_s)
        except FunctionLoadError as error:
            raise FunctionFailedError(function, f"cannot be loaded any more: {error}") from error
        finally:
            alive = process is not None and process in self._all
            self._idle.put_nowait(process if alive else None)
        if returned.error:
            raise FunctionFailedError(function, returned.error)
        return returned.value

    async def close(self) -> None:
        """Kill all processes."""
        for process in list(self._all):
            self._discard(process)
        await asyncio.gather(*self._ending)

    async def _start_one(self) -> FunctionProcess:
        process = await FunctionProcess.start(self._functions)
        self._all.add(process)
        return process

    async def _call(self, process: FunctionProcess, call: Call, timeout_s: float) -> Returned:
        started_s = time.perf_counter()
        completed = False
        try:
            async with asyncio.timeout(timeout_s):
                returned = await process.call(call)
            completed = True
        except TimeoutError as error:
            self._replaced("timeout", call)
            raise FunctionFailedError(call.function, f"took more than {timeout_s:g} s") from error
        except EOFError as error:
            self._replaced("crash", call)
            reason = f"ended its process (exit code {await process.exit_code()})"
            raise FunctionFailedError(call.function, reason) from error
        finally:
            if not completed:
                self._discard(process)
        metrics.CALL_SECONDS.labels(call.function).observe(time.perf_counter() - started_s)
        return returned

    def _discard(self, process: FunctionProcess) -> None:
        self._all.discard(process)
        ending = asyncio.create_task(process.end())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def _replaced(self, cause: str, call: Call) -> None:
        metrics.REPLACED_PROCESSES.labels(cause).inc()
        log.warning(
            "reward process replaced",
            cause=cause,
            function=call.function,
            episode_id=call.item.episode_id,
        )
