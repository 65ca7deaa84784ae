"""Tools to copy from: a function, an async function, and a class that keeps state for an episode.

tailrace tools serve my_tools:add my_tools:lookup my_tools:Notebook
"""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, ClassVar, Literal

from tailrace.sdk import Tool, ToolSession, tool


@tool(is_idempotent=True, timeout_s=5)
def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


@tool(is_idempotent=True)
async def lookup(
    capital_of: Annotated[Literal["France", "Japan", "Peru"], "the country"],
) -> str:
    """Find a capital. Async functions must not block; plain ones may."""
    await asyncio.sleep(0.01)
    return {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima"}[capital_of]


class Notebook(Tool):
    """One notebook per episode; it keeps its lines until the episode ends."""

    name = "notebook"
    description = "Write a line into your notebook and read all of it."
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"line": {"type": "string", "description": "What to add; empty to only read."}},
        "required": ["line"],
        "additionalProperties": False,
    }

    async def create(self, session: ToolSession) -> None:
        """Begin with the arguments of the data row: `tools_kwargs: {notebook: {title: ...}}`."""
        self.lines = [session.create_kwargs.get("title", f"notes of {session.episode_id}")]

    async def execute(self, arguments: dict[str, Any]) -> str:
        """Add a line."""
        if arguments["line"]:
            self.lines.append(arguments["line"])
        return "\n".join(self.lines)

    async def release(self) -> None:
        """Nothing to release."""
        self.lines = []
