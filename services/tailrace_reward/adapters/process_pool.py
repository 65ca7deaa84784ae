"""Reward functions in processes of their own, with an enforced timeout."""

import asyncio
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tailrace.log import get_logger
from tailrace.processes import ProcessPool as Processes
from tailrace.processes import WorkerProcess
from tailrace.scorers.registry import SCORE_ADDRESS
from tailrace_protos.reward import ScoreItem
from tailrace_reward import metrics
from tailrace_reward.adapters.function_process import FunctionsLoaded, Returned, ScoringCall
from tailrace_reward.ports import ComponentFailedError

log = get_logger(__name__)

_LOAD_TIMEOUT_S = 120.0
CPU_SHARE = 0.5  # of its time limit, which a built-in scorer may use as processor time
_MODULE = "tailrace_reward.adapters.function_process"


class FunctionLoadError(Exception):
    """Functions could not be imported. Attributes: `errors` (reason by `module:name`)."""

    def __init__(self, errors: dict[str, str]) -> None:
        super().__init__("; ".join(errors.values()))
        self.errors = errors


class ScoringPool:
    """Calls functions (`module:name`) in `num_processes` processes."""

    def __init__(self, functions: Sequence[str], num_processes: int) -> None:
        self._functions = tuple(functions)
        self._processes = Processes(_MODULE, self._functions, num_processes, self._loaded)

    async def start(self) -> None:
        """Start one process, which imports all functions as a check; others start on demand."""
        await self._processes.open()

    async def call(
        self, function: str, item: ScoreItem, timeout_s: float, args: Mapping[str, Any] | None = None
    ) -> float:
        """Return the function's number for the item; raises `ComponentFailedError`.

        A built-in scorer that used half of the time as processor time gives 0.
        """
        cpu_s = timeout_s * CPU_SHARE if function == SCORE_ADDRESS else 0.0
        call = ScoringCall(function, item, dict(args or {}), cpu_s)
        try:
            async with self._processes.lend() as process:
                returned = await self._call(process, call, timeout_s)
        except FunctionLoadError as error:
            raise ComponentFailedError(function, f"cannot be loaded any more: {error}") from error
        if returned.error:
            raise ComponentFailedError(function, returned.error)
        return returned.value

    def component(
        self, function: str, timeout_s: float, args: Mapping[str, Any]
    ) -> "FunctionComponent":
        """The function as a component of the reward."""
        return FunctionComponent(self, function, timeout_s, args)

    async def close(self) -> None:
        """Kill all processes."""
        await self._processes.close()

    async def _loaded(self, process: WorkerProcess) -> None:
        """Return once the process has imported all functions; raises `FunctionLoadError`."""
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                errors = (await process.read(FunctionsLoaded)).errors
        except TimeoutError:
            reason = f"importing it took more than {_LOAD_TIMEOUT_S:.0f} s"
            errors = dict.fromkeys(self._functions, reason)
        except EOFError:
            errors = dict.fromkeys(self._functions, "importing it ended the process")
        if errors:
            raise FunctionLoadError(errors)

    async def _call(self, process: WorkerProcess, call: ScoringCall, timeout_s: float) -> Returned:
        started_s = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                returned = await process.exchange(call, Returned)
        except TimeoutError as error:
            self._replaced("timeout", call)
            raise ComponentFailedError(call.function, f"took more than {timeout_s:g} s") from error
        except EOFError as error:
            exit_code = await process.exit_code()
            if call.cpu_s and exit_code == -signal.SIGPROF:
                self._replaced("processor_time", call)
                return Returned(0.0)
            self._replaced("crash", call)
            reason = f"ended its process (exit code {exit_code})"
            raise ComponentFailedError(call.function, reason) from error
        metrics.CALL_SECONDS.labels(call.function).observe(time.perf_counter() - started_s)
        return returned

    def _replaced(self, cause: str, call: ScoringCall) -> None:
        metrics.REPLACED_PROCESSES.labels(cause).inc()
        log.warning(
            "reward process replaced",
            cause=cause,
            function=call.function,
            episode_id=call.item.episode_id,
        )


class FunctionComponent:
    """`Component` of a function in a pool."""

    def __init__(
        self, pool: ScoringPool, function: str, timeout_s: float, args: Mapping[str, Any]
    ) -> None:
        self._pool = pool
        self._function = function
        self._timeout_s = timeout_s
        self._args = args

    async def score(self, item: ScoreItem) -> float:
        """See `Component`."""
        return await self._pool.call(self._function, item, self._timeout_s, self._args)
