"""Values that a model writes as bare text; the tool's schema gives their types."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tailrace.chat.tool_parsers.calls import NoCallError, parse_json
from tailrace_protos.chat import ToolSchema

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


class ArgumentTypes:
    """Types of the arguments of one tool; of a tool that is not among `tools`, all values are texts."""

    def __init__(self, name: str, tools: Sequence[ToolSchema]) -> None:
        self._schema: Mapping[str, Any] = next(
            (tool.parameters for tool in tools if tool.name == name), {}
        )
        properties = self._schema.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}

    def value(self, key: str, text: str) -> Any:
        """Converts the text of an argument to the first of its types that fits."""
        return _typed_value(text, self._properties.get(key), self._schema)


def _typed_value(text: str, schema: object, whole: object) -> Any:
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


def _type_names(schema: object, whole: object) -> list[str]:
    """Types that a schema allows, in its order, but `null` first: it is never meant as a string.

    A schema without a type has those of the values that it lists, numbers before strings. Each part of
    `whole`, the schema that references begin in, is read once, however often it is referred to.
    """
    names: dict[str, None] = {}  # in their order, each once
    waiting, read = [schema], set[int]()
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict) or id(part) in read:
            continue
        read.add(id(part))
        reference = part.get("$ref")
        if isinstance(reference, str):
            waiting.append(_at(reference, whole))
        else:
            names |= dict.fromkeys(_own_types(part))
            waiting += reversed(list(_options(part)))
    return sorted(names, key=lambda name: name != "null")


def _own_types(schema: dict[str, Any]) -> list[str]:
    """Types that a schema declares, or those of its values."""
    declared = schema.get("type")
    listed = declared if isinstance(declared, list) else [declared]
    types = [name for name in listed if isinstance(name, str)]
    known = [name for name in types if name in _TYPES or name == "string"]
    return known if types else sorted(_types_of_values(schema), key=lambda name: name == "string")


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
