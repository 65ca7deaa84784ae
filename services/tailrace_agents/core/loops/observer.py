"""Who watches a loop being played: the terminal."""

from __future__ import annotations

from typing import Protocol

from tailrace.ledger import Prompt
from tailrace_protos.chat import ToolCall
from tailrace_protos.session import LedgerNode
from tailrace_protos.tool import ToolResult


class LoopObserver(Protocol):
    """`was_known`: the answer came from the journal."""

    def on_call(self, prompt: Prompt, node: LedgerNode, was_known: bool) -> None:
        """The model was asked `prompt` and answered `node`."""

    def on_tool(self, call: ToolCall, result: ToolResult, was_known: bool) -> None:
        """A tool answered a call."""
