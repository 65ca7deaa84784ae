"""Runners of workflows: in the event loop, or in processes that are killed at their timeout."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tailrace.config import ConfigError
from tailrace.log import get_logger
from tailrace.processes import ProcessPool, ProcessStartError, WorkerProcess
from tailrace.sdk.workflow import WorkflowEnd, load_workflow
from tailrace_agents import metrics
from tailrace_agents.adapters.outside_desk import StoredDesk
from tailrace_agents.adapters.workflow_inline import InlineRunner
from tailrace_agents.adapters.workflow_process import WORKFLOW_KEY, Load, Run, WorkflowLoaded
from tailrace_agents.config import WorkflowArgs
from tailrace_agents.core.workflow_player import RunnerFailedError
from tailrace_protos.episode import Outcome
from tailrace_protos.session import SessionOpened

log = get_logger(__name__)

_LOAD_TIMEOUT_S = 120.0
_MODULE = "tailrace_agents.adapters.workflow_process"


class SubprocRunner:
    """`WorkflowRunner` with `subproc_max_workers` processes."""

    def __init__(self, args: WorkflowArgs) -> None:
        self._args = args
        python = args.python or sys.executable
        self._pool = ProcessPool(_MODULE, (), args.subproc_max_workers, self._load, python)

    async def start(self) -> None:
        """Start one process, to see now whether the workflow can be made; others come with use."""
        try:
            await self._pool.open()
        except RunnerFailedError as error:
            raise ConfigError(str(error)) from error
        except ProcessStartError as error:
            raise ConfigError(
                f"agents.workflow.python: {error}: make that environment, with tailrace[agents] and "
                "the agent's packages in it, or correct the path"
            ) from error

    async def close(self) -> None:
        """Kill all processes."""
        await self._pool.close()

    @asynccontextmanager
    async def seat(self) -> "AsyncIterator[ProcessSeat]":
        """See `WorkflowRunner`."""
        try:
            async with self._pool.lend() as process:
                yield ProcessSeat(process, self._args.agent)
        except ProcessStartError as error:
            raise RunnerFailedError(str(error)) from error

    async def _load(self, process: WorkerProcess) -> None:
        args = self._args
        load = Load(args.agent, args.kwargs, args.http_library)
        try:
            async with asyncio.timeout(_LOAD_TIMEOUT_S):
                error = (await process.exchange(load, WorkflowLoaded)).error
        except TimeoutError:
            error = f"agents.workflow.agent: making {args.agent} took more than {_LOAD_TIMEOUT_S:.0f} s"
        except EOFError:
            error = f"agents.workflow.agent: making {args.agent} {await _end_of(process)}"
        if error:
            raise RunnerFailedError(error)


class ProcessSeat:
    """`Seat` in a process that is ours for one episode."""

    def __init__(self, process: WorkerProcess, agent: str) -> None:
        self._process = process
        self._agent = agent

    async def run(self, data: dict[str, Any], access: SessionOpened, timeout_s: float) -> WorkflowEnd:
        """See `Seat`. A process that does not answer is killed."""
        run = Run(data, access.base_url, access.api_key)
        try:
            async with asyncio.timeout(timeout_s):
                return await self._process.exchange(run, WorkflowEnd)
        except TimeoutError:
            self._replaced("timeout", access)
            return WorkflowEnd(Outcome.TIMEOUT, f"the workflow took more than {timeout_s:g} s")
        except EOFError:
            self._replaced("crash", access)
            return WorkflowEnd(Outcome.INFRA_FAILURE, f"the workflow {await _end_of(self._process)}")

    def _replaced(self, cause: str, access: SessionOpened) -> None:
        metrics.REPLACED_PROCESSES.labels(cause).inc()
        log.warning(
            "workflow process replaced",
            cause=cause,
            workflow=self._agent,
            session_id=access.session_id,
        )


async def _end_of(process: WorkerProcess) -> str:
    exit_code = await process.exit_code()
    if exit_code < 0:
        return f"ended its process (signal {signal.Signals(-exit_code).name})"
    return f"ended its process (exit code {exit_code})"


AnyRunner = InlineRunner | SubprocRunner | StoredDesk


async def start_runner(args: WorkflowArgs, source: str) -> AnyRunner:
    """Starts the configured runner; raises `ConfigError` if the workflow cannot be made."""
    try:
        runner = _make(args)
        await runner.start()
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return runner


def _make(args: WorkflowArgs) -> AnyRunner:
    if args.mode == "outside":
        return StoredDesk()
    if args.mode == "subproc":
        return SubprocRunner(args)
    return InlineRunner(load_workflow(args.agent, args.kwargs, WORKFLOW_KEY), args)
