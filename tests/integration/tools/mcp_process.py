"""An MCP server whose tools answer when a test lets them: `python mcp_process.py [PORT]`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from mcp.server.mcpserver import MCPServer

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


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
