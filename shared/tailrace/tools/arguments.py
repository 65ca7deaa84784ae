"""Arguments against a tool's JSON Schema, in words that a model can act on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jsonschema
import jsonschema.protocols
import jsonschema.validators
import msgspec

from tailrace.sdk.tool import ArgumentsError, FunctionTool, ToolOffer

_MAX_REASONS = 3
_MAX_REASON_CHARS = 300

Check = Callable[[dict[str, Any]], dict[str, Any]]


def parse_arguments(text: str) -> dict[str, Any]:
    """The JSON object that a model wrote (nothing at all counts as an empty one); `ArgumentsError`."""
    if not text.strip():
        return {}
    try:
        value = msgspec.json.decode(text.encode("utf-8", "surrogatepass"))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ArgumentsError(f"the arguments are not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ArgumentsError(f"the arguments must be a JSON object, found {_kind(value)}")
    return value


def checker(offer: FunctionTool | ToolOffer) -> Check:
    """What turns arguments into those that the tool's code gets, or raises `ArgumentsError`.

    `ValueError` for a schema that is none.
    """
    if isinstance(offer, FunctionTool):
        return offer.bind
    schema = offer.spec.parameters or {"type": "object"}
    kind = jsonschema.validators.validator_for(schema)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(
            f"tool {offer.spec.name!r}: parameters are no JSON Schema: {error.message}"
        ) from error
    return lambda arguments: _validated(kind(schema), arguments)


def _validated(validator: jsonschema.protocols.Validator, arguments: dict[str, Any]) -> dict[str, Any]:
    errors = sorted(validator.iter_errors(arguments), key=lambda error: error.json_path)
    if errors:
        raise ArgumentsError("; ".join(map(_reason, errors[:_MAX_REASONS])))
    return arguments


def _reason(error: jsonschema.ValidationError) -> str:
    place = error.json_path.removeprefix("$").removeprefix(".")
    text = error.message
    if len(text) > _MAX_REASON_CHARS:
        text = text[:_MAX_REASON_CHARS] + "..."
    return f"{text} - at `{place}`" if place else text


def _kind(value: Any) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
