"""An MCP server whose tools Tailrace serves.

tailrace tools serve --mcp 'python mcp_server.py'
python mcp_server.py 8931 & tailrace tools serve --mcp-url http://127.0.0.1:8931/mcp
"""

from __future__ import annotations

import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations

server = MCPServer("words")


@server.tool(annotations=ToolAnnotations(idempotent_hint=True))
def count_words(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())


@server.tool()
def divide(a: float, b: float) -> float:
    """Divide one number by another."""
    if b == 0:
        raise ToolError("division by zero")  # the text of any other exception stays in the server
    return a / b


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
