"""An MCP server whose tools answer when a test lets them: `python mcp_process.py [PORT [older]]`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

import uvicorn
from mcp.server.mcpserver import MCPServer
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

server = MCPServer("held")


@server.tool()
async def held(gate: str) -> str:
    """Say in the file `gate`.begun which process this is, and wait for `gate`.open."""
    begin(gate)
    while not Path(f"{gate}.open").exists():
        await asyncio.sleep(0.02)
    return "done"


@server.tool()
async def busy(gate: str) -> str:
    """The same, answering nothing else meanwhile, as a server of one thread."""
    begin(gate)
    while not Path(f"{gate}.open").exists():
        time.sleep(0.02)  # noqa: ASYNC251
    return "done"


def begin(gate: str) -> None:
    begun = Path(f"{gate}.begun")
    begun.with_suffix(".new").write_text(str(os.getpid()))
    begun.with_suffix(".new").replace(begun)


def older(app: ASGIApp) -> ASGIApp:
    """As a server of 2025 answers, which knows no `server/discover` and keeps sessions."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers", ()))
        if headers.get(b"mcp-method") == b"server/discover":
            await PlainTextResponse("Missing session ID", 400)(scope, receive, send)
        else:
            await app(scope, receive, send)

    return answer


if __name__ == "__main__":
    if "older" in sys.argv:
        uvicorn.run(older(server.streamable_http_app()), port=int(sys.argv[1]), log_level="warning")
    elif len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
