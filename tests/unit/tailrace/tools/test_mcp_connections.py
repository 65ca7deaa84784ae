"""Connections to an MCP server that follow each other."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, ClassVar

import mcp
import pytest

from tailrace.sdk.tool import ToolUnavailableError
from tailrace.tools.mcp import McpServer


class Connection:
    """Connection whose calls fail or return as a test tells them."""

    made: ClassVar[list[Connection]] = []

    def __init__(self, *_: Any, **__: Any) -> None:
        self.calls: list[asyncio.Future[Any]] = []
        self.made.append(self)

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Leaves the calls to the test."""

    async def list_tools(self, cursor: str | None = None) -> Any:
        return SimpleNamespace(tools=[], next_cursor="")

    async def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        self.calls.append(asyncio.get_running_loop().create_future())
        return await self.calls[-1]


async def until_num_calls(connection: Connection, num: int) -> None:
    async with asyncio.timeout(60):
        while len(connection.calls) < num:
            await asyncio.sleep(0)


async def test_a_call_that_the_lost_connection_ends_late_leaves_the_new_one_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mcp, "Client", Connection)
    monkeypatch.setattr(Connection, "made", [])
    server = McpServer("http://127.0.0.1:9/mcp")
    running = asyncio.create_task(server.run())
    await server.offers(20.0)
    (first,) = Connection.made
    early, late = (asyncio.create_task(server.call("t", {})) for _ in range(2))
    await until_num_calls(first, 2)
    first.calls[0].set_exception(ConnectionError("reset"))
    with pytest.raises(ToolUnavailableError):
        await early
    async with asyncio.timeout(60):
        while len(Connection.made) < 2 or server._client is None:
            await asyncio.sleep(0.01)
    first.calls[1].set_exception(ConnectionError("reset"))
    with pytest.raises(ToolUnavailableError):
        await late
    again = asyncio.create_task(server.call("t", {}))
    await until_num_calls(Connection.made[1], 1)
    assert not server._is_lost.is_set()
    Connection.made[1].calls[0].set_result(
        SimpleNamespace(content=[], structured_content=None, is_error=False)
    )
    assert not (await again).is_error
    assert len(Connection.made) == 2
    server.stop(running)
    await asyncio.wait({running})
