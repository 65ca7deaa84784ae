"""`qwen3_coder`: functions and parameters as tags (Qwen3-Coder).

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

_CALL, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_CALL_END, _FUNCTION_END, _PARAMETER_END = "</tool_call>", "</function>", "</parameter>"
_ENDS = {_CALL: _CALL_END, _FUNCTION: _FUNCTION_END}
_MARKS = re.compile("|".join((*_ENDS, *_ENDS.values())))
_NAME = re.compile(r"[^>\n]*")


class Qwen3CoderParser(ToolParser):
    """Format `<tool_call><function=f><parameter=x>1</parameter></function></tool_call>`, repeated."""

    special_texts = (_CALL, "</tool_call>")
    begins = (_CALL, _FUNCTION)
    template_call = re.compile(r"<function=probe>")

    def parse(self, text: str, tools: Sequence[ToolSchema]) -> ParsedCalls:
        """See `ToolParser`; the outer tag and the end tags of the last call may be missing."""
        found = CallCollector()
        at = 0
        for start, stop in _blocks(text):
            found.text(text[at:start])
            raw = text[start:stop]
            found.block(raw, partial(_calls, raw, tools))
            at = stop
        found.text(text[at:])
        return found.parsed()


def _blocks(text: str) -> Iterable[tuple[int, int]]:
    """Start and end of each block; without an end tag, it ends at the next block or with the reply."""
    start, begun = -1, ""
    for mark in _MARKS.finditer(text):
        if mark.group() == _ENDS.get(begun):
            yield start, mark.end()
            begun = ""
        elif mark.group() == _CALL or (mark.group() == _FUNCTION and begun != _CALL):
            if begun:
                yield start, mark.start()
            start, begun = mark.start(), mark.group()
    if begun:
        yield start, len(text)


def _calls(block: str, tools: Sequence[ToolSchema]) -> Iterable[FoundCall]:
    _, *functions = block.split(_FUNCTION)
    if not functions:
        raise NoCallError("it names no function")
    return [_call(function, tools) for function in functions]


def _call(function: str, tools: Sequence[ToolSchema]) -> FoundCall:
    name, body = _named(function.partition(_FUNCTION_END)[0].partition(_CALL_END)[0])
    body = body.removeprefix(">")
    types = ArgumentTypes(name, tools)
    arguments: dict[str, Any] = {}
    for parameter in body.split(_PARAMETER)[1:]:
        key, value = _named(parameter)
        if not value.startswith(">"):
            raise NoCallError(f"the tag of the parameter {excerpt(key)} is not closed")
        if key in arguments:
            raise NoCallError(f"the parameter {excerpt(key)} is given twice")
        text = value[1:].partition(_PARAMETER_END)[0]
        arguments[key] = types.value(key, _unwrapped(text))
    if body.strip() and not arguments:
        raise NoCallError(f"the call of {name} has text but no parameters")
    return make_call(name, arguments)


def _named(text: str) -> tuple[str, str]:
    """Name at the beginning of a tag, and the text from the tag's end on."""
    found = _NAME.match(text)
    assert found is not None
    return found.group().strip(), text[found.end() :]


def _unwrapped(value: str) -> str:
    """Removes the line feeds between a value and its tags."""
    return value.removeprefix("\n").removesuffix("\n")
