"""`tailrace tools`: serve tools, list those that are served, call one."""

import asyncio
import contextlib
import json
import os
import sys
import uuid
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import typer
import uvloop
from nats.errors import Error as NatsError

from tailrace import log, tracing
from tailrace.bus import Bus
from tailrace.config import ConfigError, Endpoints
from tailrace.runtime.service import READY_FILE
from tailrace.store import StoreConnection, connect
from tailrace.tools import ToolClient, ToolDeadlines
from tailrace.tools.discovery import (
    Discovery,
    EndpointInfo,
    WorkerInfo,
    WorkerStats,
    schema_hash,
)
from tailrace.tools.host import DEFAULT_MAX_CONCURRENCY
from tailrace.tools.port import ToolPort
from tailrace.tools.serving import ToolServing, tool_service
from tailrace_cli.cluster.servers import connection_environment, servers_of
from tailrace_cli.console import plain_console, tell, tell_error
from tailrace_protos.chat import ToolCall
from tailrace_protos.tool import ToolResult

app = typer.Typer(no_args_is_help=True, help="Serve tools, list those that are served, call one.")
console = plain_console(soft_wrap=True)

Nats = Annotated[str, typer.Option("--nats", envvar="TAILRACE_NATS_URL", help="URL of nats-server.")]
User = Annotated[str, typer.Option("--user", envvar="TAILRACE_NATS_USER", help="NATS user.")]
Password = Annotated[
    str,
    typer.Option(
        "--password", envvar="TAILRACE_NATS_PASSWORD", help="Its password; better in the environment."
    ),
]
Redis = Annotated[
    str,
    typer.Option(
        "--redis", envvar="TAILRACE_REDIS_URL", help="URL of Redis, for payloads above NATS's limit."
    ),
]
RunDir = Annotated[
    Path | None,
    typer.Option("--run-dir", help="Directory of a run on this machine: its servers and credentials."),
]
Run = Annotated[str, typer.Option("--run", help="For this run only; default: for every run.")]

LOCAL = "nats://127.0.0.1:4222"
CONNECT_WITHIN_S = 3.0
CALL_DEADLINES = ToolDeadlines(nobody_s=3.0, full_s=30.0)


@app.command()
def serve(
    tools: Annotated[list[str] | None, typer.Argument(help="Tools as module:name.")] = None,
    mcp: Annotated[
        list[str] | None, typer.Option(help="MCP server to start, as a command line; may be repeated.")
    ] = None,
    mcp_url: Annotated[
        list[str] | None, typer.Option(help="MCP server by streamable HTTP; may be repeated.")
    ] = None,
    run: Run = "",
    max_concurrency: Annotated[
        int, typer.Option(min=1, help="Calls that run at once; as many may wait.")
    ] = DEFAULT_MAX_CONCURRENCY,
    connect_within_s: Annotated[
        float, typer.Option(min=0.1, help="Time for MCP servers to answer at the start.")
    ] = 30.0,
    drain_s: Annotated[
        float, typer.Option(min=0.0, help="Time for running calls and sessions to end at the end.")
    ] = 10.0,
    nats: Nats = LOCAL,
    user: User = "",
    password: Password = "",
    redis: Redis = "",
    run_dir: RunDir = None,
) -> None:
    """Serve tools until SIGTERM or Ctrl-C, which let running calls end."""
    if str(Path.cwd()) not in sys.path:  # a run's own worker has it behind the experiment's folder
        sys.path.insert(0, "")  # modules in the folder where this was started
    run = run or _run_of(run_dir)
    servers = [*(mcp or []), *(mcp_url or [])]
    serving = ToolServing(tools or [], servers, run, max_concurrency, connect_within_s, drain_s)
    endpoints = _endpoints(nats, user, password, redis, run_dir, "tools")
    service = tool_service(serving, endpoints)
    if READY_FILE not in os.environ:  # a run's own worker waits for a NATS that starts again
        asyncio.run(_require_nats(endpoints))
    log.configure(service="tools", run=run)
    tracing.configure(service.run, "tools", service.instance_id)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        exit_code = runner.run(service.serve())
    tracing.close()
    if exit_code:
        tell_error(service.stop_reason)
    raise typer.Exit(exit_code)


@app.command("ls")
def list_tools(
    nats: Nats = LOCAL,
    user: User = "",
    password: Password = "",
    run_dir: RunDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object a tool.")] = False,
) -> None:
    """List the tools that are served: schema, workers, load."""
    workers, stats = asyncio.run(_discover(_endpoints(nats, user, password, "", run_dir)))
    for subject, served in _by_subject(workers).items():
        described = _describe(subject, served, stats)
        console.print(json.dumps(described) if as_json else _readable(described))
    if not workers and not as_json:
        tell("no tools are served; start some with `tailrace tools serve module:tool`")


@app.command()
def call(
    name: Annotated[str, typer.Argument(help="Name of the tool.")],
    arguments: Annotated[str, typer.Argument(help="Its arguments, a JSON object.")] = "{}",
    run: Run = "",
    timeout_s: Annotated[float, typer.Option(help="Give up after so long; 0: the tool's own.")] = 0.0,
    nats: Nats = LOCAL,
    user: User = "",
    password: Password = "",
    redis: Redis = "",
    run_dir: RunDir = None,
) -> None:
    """Call a tool and print what it returns; an error goes to stderr, with exit code 1."""
    endpoints = _endpoints(nats, user, password, redis, run_dir)
    run = run or _run_of(run_dir)
    result = asyncio.run(_call(endpoints, run, ToolCall("cli", name, arguments), timeout_s))
    if result.infra_error:
        tell_error(result.infra_error)
    else:
        (sys.stderr if result.is_error else sys.stdout).write(result.content + "\n")
    raise typer.Exit(1 if result.is_error or result.infra_error else 0)


def _run_of(run_dir: Path | None) -> str:
    """Name of the run in this directory, also of `.` and of a link."""
    return run_dir.resolve().name if run_dir else ""


def _endpoints(
    nats: str, user: str, password: str, redis: str, run_dir: Path | None, run_user: str = "cli"
) -> Endpoints:
    """Addresses with credentials: of the options, or of a run as its user `run_user`.

    Redis's user and password may be in the environment, as services'.
    """
    if run_dir is not None:
        servers = servers_of(run_dir.resolve())
        return Endpoints.from_env(connection_environment(run_user, servers))
    names = [name for name in os.environ if name.startswith(("TAILRACE_REDIS_", "TAILRACE_CA_FILE"))]
    env = {name: os.environ[name] for name in names} if redis else {}
    found = Endpoints.from_env({**env, "TAILRACE_NATS_URL": nats, "TAILRACE_REDIS_URL": redis})
    return msgspec.structs.replace(found, nats_user=user, nats_password=password)


@contextlib.asynccontextmanager
async def _connected(endpoints: Endpoints) -> AsyncIterator[Bus]:
    """A connection for one command; `ConfigError` without an answer, and for what it may not do."""
    log.configure(form="console", level="error")  # the error of this command says what was tried
    try:
        async with asyncio.timeout(CONNECT_WITHIN_S):
            bus = await Bus.connect(endpoints, name="cli")
    except TimeoutError as error:
        raise ConfigError(
            f"no NATS answers at {endpoints.shown_nats_url} within {CONNECT_WITHIN_S:g} s: start it, "
            "name another with --nats, or a run that goes on with --run-dir"
        ) from error
    except (NatsError, ValueError) as error:
        raise ConfigError(f"--nats {endpoints.nats_url!r} is no URL: {error}") from error
    try:
        yield bus
        if denied := bus.connection.denied:
            raise ConfigError(
                f"user {endpoints.nats_user!r} may not do this: {denied[0]}: give another user"
            )
    finally:
        await bus.close()


async def _require_nats(endpoints: Endpoints) -> None:
    """Raises `ConfigError` if NATS does not answer now; a worker that serves waits for it."""
    async with _connected(endpoints):
        pass


async def _discover(endpoints: Endpoints) -> tuple[list[WorkerInfo], dict[str, WorkerStats]]:
    async with _connected(endpoints) as bus:
        discovery = Discovery(ToolPort(bus), "")
        workers = await discovery.workers()
        return workers, await discovery.stats(workers)


async def _call(endpoints: Endpoints, run: str, call: ToolCall, timeout_s: float) -> ToolResult:
    async with _connected(endpoints) as bus:
        redis: StoreConnection | None = (
            await connect(endpoints.redis_url) if endpoints.redis_url else None
        )
        client = ToolClient(bus, run, redis=redis, deadlines=CALL_DEADLINES)
        try:
            async with client.session(f"cli-{uuid.uuid4().hex[:8]}", [call.name]) as tools:
                return await tools.call(call, timeout_s or None)
        finally:
            await client.close()
            if redis is not None:
                await redis.aclose()


Served = Sequence[tuple[WorkerInfo, EndpointInfo]]


def _by_subject(workers: list[WorkerInfo]) -> dict[str, list[tuple[WorkerInfo, EndpointInfo]]]:
    """Workers by subject, in alphabetical order; those without a valid schema are told instead."""
    found: dict[str, list[tuple[WorkerInfo, EndpointInfo]]] = {}
    for worker in workers:
        for endpoint in filter(lambda each: each.is_tool, worker.endpoints):
            try:
                schema_hash(endpoint.tool)
            except (msgspec.DecodeError, RecursionError) as error:
                tell(f"{endpoint.subject}: a worker serves it without a valid schema: {error}")
            else:
                found.setdefault(endpoint.subject, []).append((worker, endpoint))
    return dict(sorted(found.items()))


def _describe(subject: str, served: Served, stats: dict[str, WorkerStats]) -> dict[str, object]:
    schema = served[0][1].tool
    return {
        "name": schema.name,
        "subject": subject,
        "description": schema.description,
        "parameters": schema.parameters,
        "schemas": sorted({schema_hash(endpoint.tool) for _, endpoint in served}),
        "workers": [
            {**_load(worker, subject, stats), "schema": schema_hash(endpoint.tool)}
            for worker, endpoint in served
        ],
    }


def _load(worker: WorkerInfo, subject: str, stats: dict[str, WorkerStats]) -> dict[str, object]:
    known = stats.get(worker.id)
    load: dict[str, object] = {"worker_id": (worker.metadata or {}).get("worker_id", worker.id)}
    for endpoint in known.endpoints if known else ():
        if endpoint.subject == subject:
            load |= {"num_requests": endpoint.num_requests, **(endpoint.data or {})}
    return load


def _readable(tool: dict[str, object]) -> str:
    lines = [f"{tool['name']}  ({tool['subject']})"]
    lines += [f"  {line}" for line in str(tool["description"]).splitlines()]
    lines.append(f"  parameters {json.dumps(tool['parameters'])}")
    schemas = tool["schemas"]
    assert isinstance(schemas, list)
    if len(schemas) > 1:
        lines.append(f"  warning: workers serve {len(schemas)} different schemas; the first is shown")
    workers = tool["workers"]
    assert isinstance(workers, list)
    for worker in workers:
        load = ", ".join(f"{key} {value}" for key, value in worker.items() if key != "worker_id")
        lines.append(f"  worker {worker['worker_id']}  {load}")
    return "\n".join(lines)
