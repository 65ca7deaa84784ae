"""`glm45`: a name, then keys and values as tags (GLM 4.5 and later).

Values are bare text. The tool's schema gives their types.
"""

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from tailrace.chat.tool_parsers.calls import CallCollector, NoCallError, excerpt, make_call
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls, ToolParser
from tailrace.chat.tool_parsers.typed_values import ArgumentTypes
from tailrace_protos.chat import ToolSchema

_BEGIN, _END = "<tool_call>", "</tool_call>"
_KEY, _KEY_END = "<arg_key>", "</arg_key>"
_VALUE, _VALUE_END = "<arg_value>", "</arg_value>"


class Glm45Parser(ToolParser):
    """Format `<tool_call>f<arg_key>x</arg_key><arg_value>1</arg_value></tool_call>`, repeated."""

    special_texts = (_BEGIN, _END, _KEY, _KEY_END, _VALUE, _VALUE_END)
    begins = (_BEGIN,)
    template_call = re.compile(r"<tool_call>probe\s*<arg_key>")

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """See `ToolParser`; the end tags of the last call may be missing."""
        found = CallCollector()
        found.blocks(text, _BEGIN, _END, partial(_calls, tools))
        return found.parsed()


def _calls(tools: Sequence[ToolSchema], block: str) -> Iterable[FoundCall]:
    written, *pairs = block.split(_KEY)
    name = written.strip()
    types = ArgumentTypes(name, tools)
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, _, rest = pair.partition(_KEY_END)
        before, opened, value = rest.partition(_VALUE)
        key = key.strip()
        if not opened or before.strip():
            raise NoCallError(f"the argument {excerpt(key)} has no value")
        if key in arguments:
            raise NoCallError(f"the argument {excerpt(key)} is given twice")
        arguments[key] = types.value(key, value.partition(_VALUE_END)[0])
    return [make_call(name, arguments)]
