"""Bare text to the JSON value that a parameter's schema asks for."""

from __future__ import annotations

from typing import Any

from tailrace.chat.tool_parsers.arguments import NoCallError, parse_json

_KINDS: dict[str, type | tuple[type, ...]] = {
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}


def typed_value(text: str, schema: object) -> Any:
    """The value of the first type that fits; the text itself where none does or none is told."""
    for kind in _types(schema):
        if kind == "string":
            return text
        value = _as_kind(text.strip(), kind)
        if value is not _UNFIT:
            return value
    return text


_UNFIT = object()


def _as_kind(text: str, kind: str) -> Any:
    literal = {"True": "true", "False": "false", "None": "null"}.get(text, text)
    try:
        value = parse_json(literal)
    except NoCallError:
        return _UNFIT
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return int(value)
    is_fit = isinstance(value, _KINDS.get(kind, ())) and (
        kind == "boolean" or not isinstance(value, bool)
    )
    return value if is_fit else _UNFIT


def _types(schema: object) -> list[str]:
    """The types that a schema allows, in its order, `null` first: it is never meant as a string."""
    if not isinstance(schema, dict):
        return []
    declared = schema.get("type")
    types = [declared] if isinstance(declared, str) else []
    if isinstance(declared, list):
        types += [kind for kind in declared if isinstance(kind, str)]
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            types += _types(option)
    return sorted(types, key=lambda kind: kind != "null")
