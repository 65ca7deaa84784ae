"""Guides: constraints of a request as texts that the engine is bound to while it samples."""

import json
from typing import Any, Literal

from tailrace.chat import Renderer
from tailrace_gateway.core.call import ModelCall, OutputConstraints, ReplyFormat
from tailrace_gateway.core.errors import BadRequestError
from tailrace_protos.chat import ToolSchema
from tailrace_protos.generation import Guide, GuidedCalls

Guiding = Literal["auto", "off", "required"]


def guide_of(call: ModelCall, renderer: Renderer, guiding: Guiding) -> Guide | None:
    """Return the guide of a call; None if nothing is constrained, or replies are only checked.

    Raise `BadRequestError` where guidance is required and engines cannot be bound to the model's format
    of calls or thoughts.
    """
    constraints = call.constraints
    schema = _schema_of(constraints)
    if guiding == "off" or not (schema or constraints.needs_tool_call):
        return None
    guide = _token_level(schema) if call.is_token_level else _chat(call, schema, renderer)
    if guide is None and guiding == "required":
        raise BadRequestError(
            "gateway.guided_decoding is 'required', but replies in this model's format of tool calls "
            "or of reasoning cannot be guided"
        )
    if guide is None or guiding == "required":
        return guide
    return Guide(guide.json_schema, guide.calls, guide.thought_begin, guide.thought_end, True)


def _schema_of(constraints: OutputConstraints) -> str:
    if constraints.reply_format is ReplyFormat.TEXT:
        return ""
    schema = constraints.json_schema
    return _text({"type": "object"} if schema is None else schema, constraints.format_param)


def _token_level(schema: str) -> Guide | None:
    return Guide(schema) if schema else None


def _chat(call: ModelCall, schema: str, renderer: Renderer) -> Guide | None:
    """A required call excludes other answers; without one, a reply may also be a call."""
    thoughts, needed = renderer.thoughts, call.constraints.needs_tool_call
    has_calls = needed or bool(call.tools and call.finds_calls)
    calls = _calls(call, renderer) if has_calls else None
    if thoughts is None or (has_calls and calls is None):
        return None
    return Guide("" if needed else schema, calls, thoughts.begin, thoughts.end)


def _calls(call: ModelCall, renderer: Renderer) -> GuidedCalls | None:
    form, constraints = renderer.call_form, call.constraints
    if form is None:
        return None
    named = constraints.tool_name
    schemas = tuple(
        _call_schema(tool, form.arguments_key) for tool in call.tools if named in ("", tool.name)
    )
    is_single = bool(named) or constraints.max_tool_calls == 1
    return GuidedCalls(schemas, form.begin, form.end, form.separator, is_single)


def _call_schema(tool: ToolSchema, arguments_key: str) -> str:
    """JSON Schema of the text of a call."""
    arguments = tool.parameters or {"type": "object"}
    definitions = {key: arguments[key] for key in ("$defs", "definitions") if key in arguments}
    parts = {"name": {"const": tool.name}, arguments_key: arguments}
    schema = definitions | {
        "type": "object",
        "properties": parts,
        "required": list(parts),
        "additionalProperties": False,
    }
    return _text(schema, "tools")


def _text(schema: dict[str, Any], param: str) -> str:
    try:
        return json.dumps(schema)
    except RecursionError as error:
        raise BadRequestError(f"{param}: a schema is nested too deeply", param=param) from error
