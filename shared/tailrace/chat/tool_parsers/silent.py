"""`none`: replies hold no tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.chat.tool_parsers.protocol import ParsedCalls
from tailrace_protos.chat import ToolSchema


class SilentParser:
    """Every reply is content."""

    special_texts: tuple[str, ...] = ()

    def certain(self, text: str, start: int) -> int:
        """All of it."""
        return len(text)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """The text as it is."""
        return ParsedCalls(text)
