"""Process that plays workflow episodes, one after another; `workflow_pool` starts it.

It first gets one `Load` and answers with `WorkflowLoaded`; then it answers every `Run` with a
`WorkflowEnd`.

Its environment variables name the endpoint (`OPENAI_BASE_URL` and so on), anew for every episode, for
agents that make their own clients. Such agents must make them in `run`, not at import.
"""

import asyncio
import os
import sys
from typing import Any

import msgspec

from tailrace.config import ConfigError
from tailrace.processes import ParentLink
from tailrace.sdk.http import make_http_client
from tailrace.sdk.workflow import Workflow, WorkflowEnd, load_workflow, run_to_end
from tailrace_protos.episode import Outcome

WORKFLOW_KEY = "agents.workflow.agent"


class Load(msgspec.Struct, frozen=True):
    """Make the workflow."""

    agent: str
    kwargs: dict[str, Any]
    http_library: str


class WorkflowLoaded(msgspec.Struct, frozen=True):
    """Answer to `Load`; `error` tells the user why the workflow could not be made."""

    error: str = ""


class Run(msgspec.Struct, frozen=True):
    """Play an episode."""

    data: dict[str, Any]
    base_url: str
    api_key: str


def main() -> int:
    """Load the workflow, then play until the input ends."""
    link = ParentLink.open()
    load = link.receive(msgspec.msgpack.Decoder(Load))
    if load is None:
        return 0
    try:
        workflow = load_workflow(load.agent, load.kwargs, WORKFLOW_KEY)
        http_client = make_http_client(load.http_library)  # type: ignore[arg-type]  # checked as config
    except ConfigError as error:
        link.send(WorkflowLoaded(str(error)))
        return 0
    link.send(WorkflowLoaded())
    decoder = msgspec.msgpack.Decoder(Run)
    with asyncio.Runner() as runner:
        while (run := link.receive(decoder)) is not None:
            link.send(runner.run(_play(workflow, run, http_client)))
    return 0


async def _play(workflow: Workflow, run: Run, http_client: Any) -> WorkflowEnd:
    os.environ.update(environment(run.base_url, run.api_key))
    offered = {"base_url": run.base_url, "api_key": run.api_key, "http_client": http_client}
    try:
        return await run_to_end(workflow, run.data, offered)
    except asyncio.CancelledError:  # no other code in this process cancels
        return WorkflowEnd(Outcome.INFRA_FAILURE, "the workflow cancelled itself")
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def environment(base_url: str, api_key: str) -> dict[str, str]:
    """Environment variables of SDKs; Anthropic's SDK adds `/v1` to its base URL itself."""
    return {
        "OPENAI_BASE_URL": base_url,
        "OPENAI_API_BASE": base_url,
        "OPENAI_API_KEY": api_key,
        "ANTHROPIC_BASE_URL": base_url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": api_key,
    }


if __name__ == "__main__":
    sys.exit(main())
