"""`mistral`: calls behind `[TOOL_CALLS]`, as a JSON array or as name and arguments each (Mistral)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from tailrace.chat.text_stream import first_possible
from tailrace.chat.tool_parsers.arguments import NoCallError, call_of, make_call, parse_json
from tailrace.chat.tool_parsers.blocks import CallCollector
from tailrace.chat.tool_parsers.hermes import json_values
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls
from tailrace_protos.chat import ToolSchema

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]` or `[TOOL_CALLS]name[ARGS]{...}`."""

    special_texts: tuple[str, ...] = (_BEGIN, _ID, _ARGUMENTS)

    def certain(self, text: str, start: int) -> int:
        """Content ends where the first marker begins."""
        return first_possible(text, (_BEGIN,), start)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """Take the calls out."""
        found = CallCollector()
        before, *blocks = text.split(_BEGIN)
        found.text(before)
        for block in blocks:
            found.block(_BEGIN + block, partial(_calls, block))
        return found.parsed()


def _calls(block: str) -> list[FoundCall]:
    head, found, arguments = block.partition(_ARGUMENTS)
    if found:
        name, _, call_id = head.partition(_ID)
        return [make_call(name.strip(), arguments, call_id.strip())]
    name, brace, rest = block.partition("{")
    if brace and name.strip() and not name.lstrip().startswith("["):
        return [make_call(name.strip(), parse_json(brace + rest))]
    values = json_values(block)
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    if not values:
        raise NoCallError("it is empty")
    return [call_of(value) for value in values]
