"""`qwen3_coder`: functions and parameters as tags (Qwen3-Coder).

Values are written as bare text, so the tool's schema says what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tailrace.chat.text_stream import first_possible
from tailrace.chat.tool_parsers.arguments import NoCallError, make_call
from tailrace.chat.tool_parsers.blocks import CallCollector
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls
from tailrace.chat.tool_parsers.typed_values import typed_value
from tailrace_protos.chat import ToolSchema

_CALL, _FUNCTION = "<tool_call>", "<function="
# A block runs to its end tag; without one to the next block or the end of the reply.
_BLOCK = re.compile(
    r"<tool_call>(?:(?!<tool_call>).)*?</tool_call>|<tool_call>(?:(?!<tool_call>).)*"
    r"|<function=(?:(?!<function=|<tool_call>).)*?</function>|<function=(?:(?!<function=|<tool_call>).)*",
    re.DOTALL,
)
_FUNCTIONS = re.compile(
    r"<function=([^>\n]*)>?(.*?)(?=</function>|<function=|</tool_call>|\Z)", re.DOTALL
)
_PARAMETERS = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


class Qwen3CoderParser:
    """`<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`, one or more."""

    special_texts: tuple[str, ...] = (_CALL, "</tool_call>")

    def certain(self, text: str, start: int) -> int:
        """Content ends where the first tag begins."""
        return first_possible(text, (_CALL, _FUNCTION), start)

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """Take the calls out; models forget the outer tag, or the end tags of the last call."""
        found = CallCollector()
        at = 0
        for block in _BLOCK.finditer(text):
            found.text(text[at : block.start()])
            raw = block.group()
            found.block(raw, partial(_calls, raw, tools))
            at = block.end()
        found.text(text[at:])
        return found.parsed()


def _calls(block: str, tools: Sequence[ToolSchema]) -> Iterable[FoundCall]:
    calls = [_call(name.strip(), body, tools) for name, body in _FUNCTIONS.findall(block)]
    if not calls:
        raise NoCallError("it names no function")
    return calls


def _call(name: str, body: str, tools: Sequence[ToolSchema]) -> FoundCall:
    types = _parameter_schemas(name, tools)
    arguments = {
        key.strip(): typed_value(_unwrapped(value), types.get(key.strip()))
        for key, value in _PARAMETERS.findall(body)
    }
    if body.strip() and not arguments:
        raise NoCallError(f"the call of {name} has text but no parameters")
    return make_call(name, arguments)


def _parameter_schemas(name: str, tools: Sequence[ToolSchema]) -> Mapping[str, Any]:
    for tool in tools:
        if tool.name == name:
            properties = tool.parameters.get("properties")
            return properties if isinstance(properties, dict) else {}
    return {}


def _unwrapped(value: str) -> str:
    """The value without the line feeds that set it apart from its tags."""
    return value.removeprefix("\n").removesuffix("\n")
