"""Output constraints: checks of finished replies against the request.

The gateway has no grammar engine: it does not constrain sampling, it checks the finished reply. A reply
that its token budget cut short passes unchecked, with its finish reason.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jsonschema
import msgspec

from tailrace_gateway.core.call import (
    Completion,
    OutputConstraints,
    ReplyChoice,
    ReplyFormat,
    StopReason,
)
from tailrace_gateway.core.errors import BadRequestError, OutputConstraintError
from tailrace_protos.chat import ToolSchema


def check_schema(constraints: OutputConstraints) -> None:
    """Refuse an invalid JSON Schema before sampling."""
    if constraints.json_schema is None:
        return
    try:
        jsonschema.Draft202012Validator.check_schema(constraints.json_schema)
    except jsonschema.SchemaError as error:
        reason = f"response_format: not a valid JSON Schema: {error.message}"
        raise BadRequestError(reason, param="response_format") from error


def check_constraints(constraints: OutputConstraints, completion: Completion) -> None:
    """Raise `OutputConstraintError` for the first choice that violates a constraint."""
    for choice in completion.choices:
        if choice.stop_reason is StopReason.LENGTH:
            continue
        _check_tools(constraints, choice)
        if not choice.message.tool_calls:
            _check_format(constraints, choice)


def _check_tools(constraints: OutputConstraints, choice: ReplyChoice) -> None:
    calls = choice.message.tool_calls
    if constraints.needs_tool_call and not calls:
        raise _not_met("tool_choice", "the model called no tool", choice)
    if constraints.forbids_tool_calls and calls:
        raise _not_met("tool_choice", "the model called a tool", choice)
    for call in calls:
        if constraints.tool_name and call.name != constraints.tool_name:
            reason = f"the model called {call.name!r}, not {constraints.tool_name!r}"
            raise _not_met("tool_choice", reason, choice)
    if constraints.max_tool_calls is not None and len(calls) > constraints.max_tool_calls:
        raise _not_met("parallel_tool_calls", f"the model made {len(calls)} calls at once", choice)


def _check_format(constraints: OutputConstraints, choice: ReplyChoice) -> None:
    if constraints.reply_format is ReplyFormat.TEXT:
        return
    try:
        value: Any = msgspec.json.decode(choice.message.content.encode())
    except msgspec.DecodeError as error:
        raise _not_met("response_format", f"the reply is not valid JSON: {error}", choice) from error
    if constraints.reply_format is ReplyFormat.JSON_OBJECT and not isinstance(value, dict):
        raise _not_met("response_format", "the reply is JSON, but not an object", choice)
    if constraints.json_schema is not None:
        validator = jsonschema.Draft202012Validator(constraints.json_schema)
        misfit = jsonschema.exceptions.best_match(validator.iter_errors(value))
        if misfit is not None:
            reason = f"the reply does not fit the schema at {misfit.json_path}: {misfit.message}"
            raise _not_met("response_format", reason, choice)


def _not_met(param: str, reason: str, choice: ReplyChoice) -> OutputConstraintError:
    message = f"{param}: {reason}; replies are checked, not forced"
    return OutputConstraintError(message, param=param, completion_id=choice.completion_id)


class ToolChoice(NamedTuple):
    """Requested use of tools. `any`: some tool is required; `tool`: the named one; `none`: no tool."""

    kind: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""


def tool_constraints(
    choice: ToolChoice, tools: Sequence[ToolSchema], *, is_parallel: bool = True
) -> OutputConstraints:
    """Return the constraints of a tool choice; without `is_parallel` a reply makes at most one call."""
    if choice.kind == "tool" and choice.name not in {tool.name for tool in tools}:
        raise BadRequestError(f"tool_choice: there is no tool {choice.name!r}", param="tool_choice")
    if choice.kind == "any" and not tools:
        reason = "tool_choice: a call is required, but there are no tools"
        raise BadRequestError(reason, param="tool_choice")
    return OutputConstraints(
        needs_tool_call=choice.kind in ("any", "tool"),
        forbids_tool_calls=choice.kind == "none",
        tool_name=choice.name,
        max_tool_calls=None if is_parallel else 1,
    )
