"""Process of a tool worker: a service of the runtime with a `ToolWorker`."""

import asyncio
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.config import ConfigError, Endpoints, RunConfig
from tailrace.import_path import load_extra, load_object
from tailrace.runtime import Service
from tailrace.sdk.tool import AnyTool, as_offer
from tailrace.store import StoreConnection, connect
from tailrace.tools.host import DEFAULT_MAX_CONCURRENCY
from tailrace.tools.worker import ToolWorker

MCP_CLOSE_S = 10.0  # for MCP servers to end; the client kills a command within 4 s
NO_RUN = "tools"  # run name of a service for all runs


@dataclass(frozen=True)
class ToolServing:
    """Tools to serve: `tools` as `module:name`, `mcp` servers as command lines or URLs."""

    tools: Sequence[str]
    mcp: Sequence[str] = ()
    run: str = ""  # for this run only; empty: for all
    max_concurrency: int = DEFAULT_MAX_CONCURRENCY
    connect_within_s: float = 30.0  # for MCP servers to answer at the start
    drain_s: float = 10.0  # for running calls and open sessions at the end


def tool_service(serving: ToolServing, endpoints: Endpoints) -> Service:
    """Returns the service; `ConfigError` for tools that cannot be loaded.

    Without a Redis URL, results too large for a message become errors.
    """
    if not serving.tools and not serving.mcp:
        raise ConfigError("nothing to serve: name tools as module:name, or MCP servers")
    for target in serving.mcp:
        _check_program(target)
    loaded = [load_tool(dotted) for dotted in serving.tools]
    service = Service(
        "tools", RunConfig(exp_name=serving.run or NO_RUN), endpoints, drain_s=serving.drain_s + 5.0
    )
    process = _Process(service, serving, loaded)
    service.on_drain(process.disconnect)
    service.on_start(process.start)
    service.on_drain(process.drain)
    return service


def _check_program(target: str) -> None:
    """Refuses the command line of an MCP server whose program is not there; URLs pass."""
    program = next(iter(shlex.split(target)), "")
    if "://" not in target and shutil.which(program) is None:
        raise ConfigError(f"MCP server {target}: there is no program {program!r}: correct the command")


def load_tool(dotted: str, key: str = "tool") -> AnyTool:
    """Loads the tool at `module:name`; `ConfigError` names `key` and the remedy."""
    found: Any = load_object(dotted, key)
    try:
        return as_offer(found)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key} {dotted}: {error}") from error


class _Process:
    """Worker, MCP servers and Redis connection of one process."""

    def __init__(self, service: Service, serving: ToolServing, tools: list[AnyTool]) -> None:
        self._service = service
        self._serving = serving
        self._tools = tools
        self._redis: StoreConnection | None = None
        self._worker: ToolWorker | None = None
        self._mcp: list[
            tuple[Any, asyncio.Task[None]]
        ] = []  # not tasks of the service: those end before the calls

    async def start(self) -> None:
        endpoints = self._service.endpoints
        if endpoints.redis_url:
            self._redis = await connect(endpoints.redis_url)
        tools = [*self._tools, *await self._mcp_tools()]
        try:
            self._worker = ToolWorker(
                tools,
                self._service.bus,
                max_concurrency=self._serving.max_concurrency,
                run=self._serving.run,
                redis=self._redis,
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        await self._worker.start()

    async def _mcp_tools(self) -> list[AnyTool]:
        if not self._serving.mcp:
            return []
        adapter = load_extra("tailrace.tools.mcp", "tools", "an MCP server")
        within_s = self._serving.connect_within_s
        servers = [adapter.McpServer(target) for target in self._serving.mcp]
        self._mcp = [
            (server, asyncio.create_task(server.run(), name=f"mcp {server.target}"))
            for server in servers
        ]
        return [offer for server in servers for offer in await server.offers(within_s)]

    async def drain(self) -> None:
        if self._worker is not None:
            await self._worker.drain(self._serving.drain_s)

    async def disconnect(self) -> None:
        for server, task in self._mcp:
            server.stop(task)
        if self._mcp:
            await asyncio.wait({task for _, task in self._mcp}, timeout=MCP_CLOSE_S)
        if self._redis is not None:
            await self._redis.aclose()
