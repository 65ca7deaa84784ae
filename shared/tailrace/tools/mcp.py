"""Tools of an MCP server (Model Context Protocol).

`McpServer` keeps one connection, by stdio to a process that it starts or by streamable HTTP, and
reconnects when it breaks. Invariant: a failure of the connection or the server is an infrastructure
failure of the call; an error of a tool is a result for the model.
"""

import asyncio
import re
import shlex
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import mcp
import mcp_types
import msgspec

from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace.sdk.tool import Tool, ToolOffer, ToolOutput, ToolSpec, ToolUnavailableError

log = get_logger(__name__)

CHECK_EVERY_S = 5.0
_MAX_PAGES = 100
_NO_SESSION = (mcp_types.INVALID_REQUEST, mcp_types.REQUEST_TIMEOUT)  # in Python, in JavaScript


class McpServer:
    """Connection to one MCP server: `http(s)://...` (streamable HTTP) or a command line (stdio).

    A command gets a minimal environment (PATH, HOME and similar) without the credentials of the run.
    """

    def __init__(self, target: str, check_every_s: float = CHECK_EVERY_S) -> None:
        self.target = target
        self._check_every_s = check_every_s
        self._num_calls = 0
        self._is_stopped = self._is_closing = False
        self._client: mcp.Client | None = None
        self._tools: list[mcp_types.Tool] = []
        self._changed = asyncio.Event()
        self._is_lost = asyncio.Event()
        self._last_failure = "it has not answered yet"

    async def run(self) -> None:
        """Stays connected until `stop`."""
        backoff = Backoff(0.2, 10.0)
        while not self._is_stopped:
            try:
                with foreign_code(f"MCP server {self.target}"):
                    async with self._connected():
                        backoff.reset()
                        await self._stay()
            except ForeignCodeError as error:
                self._last_failure = _innermost(error.error)
                log.warning("mcp server lost", target=self.target, reason=self._last_failure)
            finally:
                self._is_closing = False
            if not self._is_stopped:
                await backoff.sleep()

    def stop(self, running: asyncio.Task[None]) -> None:
        """Ends the task of `run`; never cancels the close, since its process would then survive."""
        self._is_stopped = True
        if not self._is_closing:
            running.cancel()

    async def offers(self, wait_s: float) -> list[ToolOffer]:
        """Returns the server's tools; `ConfigError` if it is not reached within `wait_s`."""
        try:
            async with asyncio.timeout(wait_s):
                await self._changed.wait()
        except TimeoutError as error:
            raise ConfigError(
                f"MCP server {self.target}: not reached within {wait_s:g} s ({self._last_failure}): "
                "check the command or the URL"
            ) from error
        return [self._offer(tool) for tool in self._tools]

    async def call(self, name: str, arguments: dict[str, Any]) -> ToolOutput:
        """Calls a tool; `ToolUnavailableError` if the server is not reachable."""
        client = self._client
        if client is None:
            raise ToolUnavailableError(f"MCP server {self.target}: {self._last_failure}")
        self._num_calls += 1
        try:
            with foreign_code(name):
                result = await client.call_tool(name, arguments)
        except ForeignCodeError as error:
            cause = error.error
            if isinstance(cause, mcp.MCPError) and await _outlives(client, cause):
                return ToolOutput(f"{name}: {cause.message}", is_error=True)
            if client is self._client:  # else its call ends after a new connection was made
                self._is_lost.set()
            raise ToolUnavailableError(f"MCP server {self.target}: {_innermost(cause)}") from error
        finally:
            self._num_calls -= 1
        return ToolOutput(_text_of(result), is_error=result.is_error)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[None]:
        async with mcp.Client(_server(self.target), cache=None) as client:
            self._tools = await _all_tools(client)
            self._client = client
            self._is_lost.clear()
            self._changed.set()
            log.info("mcp server connected", target=self.target, num_tools=len(self._tools))
            try:
                yield
            finally:
                self._client, self._is_closing = None, True

    async def _stay(self) -> None:
        """Returns when the connection is lost; lists the tools at intervals to detect it.

        It does not do so during a call: a server with one thread cannot answer, and calls have limits.
        """
        while not self._is_lost.is_set():
            try:
                async with asyncio.timeout(self._check_every_s):
                    await self._is_lost.wait()
            except TimeoutError:
                client = self._client
                if client is not None and not self._num_calls:
                    await self._check(client)

    async def _check(self, client: mcp.Client) -> None:
        """Returns if the server answers, or is busy with a new call."""
        try:
            async with asyncio.timeout(2 * self._check_every_s):
                await client.list_tools()
        except TimeoutError:
            if not self._num_calls:
                raise

    def _offer(self, listed: mcp_types.Tool) -> ToolOffer:
        hints = listed.annotations
        spec = ToolSpec(
            name=re.sub(r"[^A-Za-z0-9_-]", "_", listed.name)[:64],
            description=listed.description or listed.title or "",
            parameters=listed.input_schema,
            is_idempotent=bool(hints and (hints.idempotent_hint or hints.read_only_hint)),
        )
        return ToolOffer(spec, lambda: McpTool(self, listed.name))


class McpTool(Tool):
    """One tool of an MCP server; the server keeps its state, if any."""

    is_stateful = False

    def __init__(self, server: McpServer, listed_name: str) -> None:
        self._server = server
        self._listed_name = listed_name

    async def execute(self, arguments: dict[str, Any]) -> ToolOutput:
        """Forwards the call."""
        return await self._server.call(self._listed_name, arguments)


def _server(target: str) -> str | mcp.StdioServerParameters:
    if target.startswith(("http://", "https://")):
        return target
    command, *arguments = shlex.split(target) or [""]
    return mcp.StdioServerParameters(command=command, args=arguments)


async def _outlives(client: mcp.Client, error: mcp.MCPError) -> bool:
    """Tells whether the connection outlives an error: a server that started again lacks its session."""
    if error.code not in _NO_SESSION:
        return error.code != mcp_types.CONNECTION_CLOSED
    try:
        with foreign_code("listing the tools"):
            await client.list_tools()
    except ForeignCodeError:
        return False
    return True


async def _all_tools(client: mcp.Client) -> list[mcp_types.Tool]:
    tools: list[mcp_types.Tool] = []
    cursor: str | None = None
    for _ in range(_MAX_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            break
    return tools


def _text_of(result: mcp_types.CallToolResult) -> str:
    """Returns the text of a result."""
    parts = [_readable(block) for block in result.content]
    if not parts and result.structured_content is not None:
        return msgspec.json.encode(result.structured_content).decode()
    return "\n".join(parts)


def _readable(block: Any) -> str:
    if isinstance(block, mcp_types.TextContent):
        return block.text
    if isinstance(block, mcp_types.EmbeddedResource):
        return str(getattr(block.resource, "text", f"[resource {block.resource.uri}]"))
    if isinstance(block, mcp_types.ResourceLink):
        return f"[resource {block.uri}]"
    return f"[{block.type} of type {block.mime_type}, not shown]"


def _innermost(error: BaseException) -> str:
    """Returns the first cause in nested exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
