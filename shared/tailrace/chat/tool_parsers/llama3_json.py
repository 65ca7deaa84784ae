"""`llama3_json`: the whole reply is one call, or several separated by `;` (Llama 3.1 to 3.3)."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tailrace.chat.text_stream import first_possible
from tailrace.chat.tool_parsers.arguments import NoCallError, call_of
from tailrace.chat.tool_parsers.blocks import CallCollector
from tailrace.chat.tool_parsers.hermes import json_values
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls
from tailrace_protos.chat import ToolSchema

_TAG = "<|python_tag|>"
_LOOKS_LIKE_CALL = re.compile(r'\{.*"name"\s*:.*"(?:parameters|arguments)"', re.DOTALL)


class Llama3JsonParser:
    """`{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`.

    A reply that is JSON but no call is content.
    """

    special_texts: tuple[str, ...] = (_TAG,)

    def certain(self, text: str, start: int) -> int:
        """Nothing while the reply may be JSON; else all up to the tag."""
        begun = text.lstrip()
        return start if not begun or begun.startswith("{") else first_possible(text, (_TAG,), start)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """Take the calls out."""
        found = CallCollector()
        before, tag, calls = text.partition(_TAG)
        if not tag:
            if not _LOOKS_LIKE_CALL.match(text.strip()):
                return ParsedCalls(text)
            before, calls = "", text
        found.text(before)
        found.block(tag + calls, lambda: _calls(calls))
        return found.parsed()


def _calls(text: str) -> list[FoundCall]:
    values = json_values(text, separators=";,")
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    if not values:
        raise NoCallError("it is empty")
    return [call_of(value) for value in values]
