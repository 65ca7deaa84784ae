"""What OpenAI's dialects let a request promise of its reply: tools and formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace_gateway.core.call import Promises, ReplyFormat
from tailrace_gateway.core.errors import InvalidRequestError, UnsupportedError
from tailrace_gateway.core.tool_choice import ToolChoice, tool_promises
from tailrace_protos.chat import ToolSchema

_NOTHING = Promises()
_CHOICES = {
    None: ToolChoice("auto"),
    "auto": ToolChoice("auto"),
    "none": ToolChoice("none"),
    "required": ToolChoice("any"),
}


def read_promises(
    choice: Any,
    parallel: bool | None,
    tools: Sequence[ToolSchema],
    wanted: dict[str, Any] | None,
    param: str = "response_format",
) -> Promises:
    """`tool_choice`, `parallel_tool_calls` and the response format, which the field `param` holds."""
    if choice is None and parallel is None and wanted is None:
        return _NOTHING
    promises = tool_promises(_read_choice(choice), tools, is_parallel=parallel is not False)
    reply_format, schema = _read_format(wanted or {}, param)
    return msgspec.structs.replace(promises, reply_format=reply_format, json_schema=schema)


def _read_choice(choice: Any) -> ToolChoice:
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")  # responses have the name beside the type
        name = (function if isinstance(function, dict) else choice).get("name")
        return ToolChoice("tool", name if isinstance(name, str) else "")
    known = _CHOICES.get(choice) if choice is None or isinstance(choice, str) else None
    if known is None:
        raise UnsupportedError(f"tool_choice: {choice!r} is not supported", param="tool_choice")
    return known


def _read_format(wanted: dict[str, Any], param: str) -> tuple[ReplyFormat, dict[str, Any] | None]:
    """The format and its schema, which may be nested or flat."""
    kind = wanted.get("type", "text")
    if kind == "text":
        return ReplyFormat.TEXT, None
    if kind == "json_object":
        return ReplyFormat.JSON_OBJECT, None
    if kind != "json_schema":
        raise UnsupportedError(f"{param}: type {kind!r} is not supported", param=param)
    nested = wanted.get("json_schema")
    schema = (nested if isinstance(nested, dict) else wanted).get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{param}: the schema is missing", param=param)
    return ReplyFormat.JSON_SCHEMA, schema
