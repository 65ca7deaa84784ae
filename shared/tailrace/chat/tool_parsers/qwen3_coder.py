"""`qwen3_coder`: functions and parameters as tags (Qwen3-Coder).

Values are bare text. The tool's schema gives their types.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from tailrace.chat.tool_parsers.calls import CallCollector, NoCallError, make_call, parse_json
from tailrace.chat.tool_parsers.protocol import FoundCall, ParsedCalls, ToolParser
from tailrace_protos.chat import ToolSchema

_CALL, _FUNCTION = "<tool_call>", "<function="
# A block ends at its end tag; without one, at the next block or at the end of the reply.
_BLOCK = re.compile(
    r"<tool_call>(?:(?!<tool_call>).)*?</tool_call>|<tool_call>(?:(?!<tool_call>).)*"
    r"|<function=(?:(?!<function=|<tool_call>).)*?</function>|<function=(?:(?!<function=|<tool_call>).)*",
    re.DOTALL,
)
_FUNCTIONS = re.compile(
    r"<function=([^>\n]*)>?(.*?)(?=</function>|<function=|</tool_call>|\Z)", re.DOTALL
)
_PARAMETERS = re.compile(r"<parameter=([^>\n]*)>(.*?)(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)


_TYPES: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
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
    """Removes the line feeds between a value and its tags."""
    return value.removeprefix("\n").removesuffix("\n")


def typed_value(text: str, schema: object) -> Any:
    """Converts `text` to the first type of `schema` that fits; without one, returns the text."""
    for name in _type_names(schema):
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


def _type_names(schema: object) -> list[str]:
    """Types that a schema allows, in its order, but `null` first: it is never meant as a string."""
    if not isinstance(schema, dict):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        types += [name for name in declared if isinstance(name, str)]
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            types += _type_names(option)
    return sorted(types, key=lambda name: name != "null")
