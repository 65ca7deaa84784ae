"""Which runner a configuration asks for."""

from __future__ import annotations

from tailrace.config import ConfigError
from tailrace.sdk.workflow import load_workflow
from tailrace_agents.adapters.workflow_inline import InlineRunner
from tailrace_agents.adapters.workflow_pool import SubprocRunner
from tailrace_agents.adapters.workflow_process import WORKFLOW_KEY
from tailrace_agents.config import WorkflowArgs

Runner = InlineRunner | SubprocRunner


async def start_runner(args: WorkflowArgs, source: str) -> Runner:
    """A runner that has made the workflow; `ConfigError` if it cannot be made."""
    try:
        runner = _make(args)
        await runner.start()
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    return runner


def _make(args: WorkflowArgs) -> Runner:
    if args.mode == "subproc":
        return SubprocRunner(args)
    return InlineRunner(load_workflow(args.agent, args.kwargs, WORKFLOW_KEY), args)
