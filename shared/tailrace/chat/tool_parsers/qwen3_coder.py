"""`qwen3_coder`: functions and parameters as tags (Qwen3-Coder).

Values are bare text. The tool's schema gives their types.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tailrace.chat.tool_parsers.calls import (
    CallCollector,
    NoCallError,
    excerpt,
    make_call,
    parse_json,
)
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls, ToolParser
from tailrace_protos.chat import ToolSchema

_CALL, _FUNCTION, _PARAMETER = "<tool_call>", "<function=", "<parameter="
_CALL_END, _FUNCTION_END, _PARAMETER_END = "</tool_call>", "</function>", "</parameter>"
_ENDS = {_CALL: _CALL_END, _FUNCTION: _FUNCTION_END}
_MARKS = re.compile("|".join((*_ENDS, *_ENDS.values())))
_NAME = re.compile(r"[^>\n]*")

_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
_TYPE_NAMES: dict[type, str] = {
    int: "integer",
    float: "number",
    bool: "boolean",
    str: "string",
    type(None): "null",
}
_NO_VALUE = object()


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
    schema = next((tool.parameters for tool in tools if tool.name == name), {})
    types = _properties(schema)
    arguments: dict[str, Any] = {}
    for parameter in body.split(_PARAMETER)[1:]:
        key, value = _named(parameter)
        if not value.startswith(">"):
            raise NoCallError(f"the tag of the parameter {excerpt(key)} is not closed")
        text = value[1:].partition(_PARAMETER_END)[0]
        arguments[key] = typed_value(_unwrapped(text), types.get(key), schema)
    if body.strip() and not arguments:
        raise NoCallError(f"the call of {name} has text but no parameters")
    return make_call(name, arguments)


def _named(text: str) -> tuple[str, str]:
    """Name at the beginning of a tag, and the text from the tag's end on."""
    found = _NAME.match(text)
    assert found is not None
    return found.group().strip(), text[found.end() :]


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    properties = schema.get("properties")
    return properties if isinstance(properties, dict) else {}


def _unwrapped(value: str) -> str:
    """Removes the line feeds between a value and its tags."""
    return value.removeprefix("\n").removesuffix("\n")


def typed_value(text: str, schema: object, whole: object) -> Any:
    """Converts `text` to the first type of `schema` that fits; without one, returns the text.

    `whole`: the schema of all parameters.
    """
    for name in _type_names(schema, whole):
        if name == "string":
            return text
        value = _as_type(text.strip(), name)
        if value is not _NO_VALUE:
            return value
    return text


def _as_type(text: str, name: str) -> Any:
    literal = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        value = parse_json(literal)
    except NoCallError:
        return _NO_VALUE
    if name == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    is_fit = isinstance(value, _TYPES.get(name, ())) and (
        name == "boolean" or not isinstance(value, bool)
    )
    return value if is_fit else _NO_VALUE


def _type_names(schema: object, whole: object, seen: tuple[str, ...] = ()) -> list[str]:
    """Types that a schema allows, in its order, but `null` first: it is never meant as a string.

    A schema without a type has those of the values that it lists, numbers before strings. `whole`: the
    schema that references begin in, `seen`: references that led here.
    """
    if not isinstance(schema, dict):
        return []
    reference = schema.get("$ref")
    if isinstance(reference, str):
        target = None if reference in seen else _at(reference, whole)
        return _type_names(target, whole, (*seen, reference))
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        types += [name for name in declared if isinstance(name, str)]
    if not types:
        types = sorted(_types_of_values(schema), key=lambda name: name == "string")
    for option in _options(schema):
        types += _type_names(option, whole, seen)
    return sorted(types, key=lambda name: name != "null")


def _options(schema: dict[str, Any]) -> Iterable[object]:
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        yield from options if isinstance(options, list) else ()


def _at(reference: str, whole: object) -> object:
    """Part of a schema that a reference such as `#/$defs/Filter` names; None without one."""
    start, *steps = reference.split("/")
    place = whole if start == "#" else None
    for step in steps:
        place = place.get(step) if isinstance(place, dict) else None
    return place


def _types_of_values(schema: dict[str, Any]) -> list[str]:
    """Types of the values of `enum` or `const`."""
    listed = schema.get("enum", [schema["const"]] if "const" in schema else [])
    values = listed if isinstance(listed, list) else []
    return [_TYPE_NAMES[type(value)] for value in values if type(value) in _TYPE_NAMES]
