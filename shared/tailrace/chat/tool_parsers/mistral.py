"""`mistral`: calls after `[TOOL_CALLS]`, as a JSON array or each as name and arguments (Mistral)."""

import re
from collections.abc import Sequence
from functools import partial

from tailrace.chat.tool_parsers.calls import (
    CallCollector,
    calls_of,
    json_values,
    make_call,
    parse_json,
)
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls, ToolParser
from tailrace_protos.chat import ToolSchema

_BEGIN, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"


class MistralParser(ToolParser):
    """Format `[TOOL_CALLS][{"name": ..., "arguments": {...}, "id": ...}]` or
    `[TOOL_CALLS]name[ARGS]{...}`."""

    special_texts = (_BEGIN, _ID, _ARGUMENTS)
    begins = (_BEGIN,)
    template_call = re.compile(r"\[TOOL_CALLS\]")

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """See `ToolParser`."""
        found = CallCollector()
        before, *blocks = text.split(_BEGIN)
        found.text(before)
        for block in blocks:
            found.block(_BEGIN + block, partial(_calls, block))
        return found.parsed()


def _calls(block: str) -> list[FoundCall]:
    begun, brace, rest = block.partition("{")  # what the markers stand in: arguments may contain them
    if _ARGUMENTS in begun:
        head, _, arguments = block.partition(_ARGUMENTS)
        name, _, call_id = head.partition(_ID)
        return [make_call(name.strip(), arguments, call_id.strip())]
    if brace and begun.strip() and not begun.lstrip().startswith("["):
        return [make_call(begun.strip(), parse_json(brace + rest))]
    return calls_of(json_values(block))
