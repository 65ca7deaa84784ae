"""Output constraints: checks of finished replies against the request.

Engines bind replies to them where they can (`guides.py`). All replies are checked when they are
finished, and `gateway.on_broken_promise` decides what follows. A reply that its token budget cut short
passes unchecked, with its finish reason.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jsonschema
import msgspec
from referencing import Registry, Resource
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012

from tailrace.cpu_limit import TooSlowError, cpu_limit
from tailrace_gateway.core.call import OutputConstraints, ReplyFormat, StopReason
from tailrace_gateway.core.errors import BadRequestError
from tailrace_protos.base import UNREADABLE
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema

NO_CONSTRAINTS = OutputConstraints()

_MAX_CHECK_S = 0.5  # in which the gateway answers nobody else
_NO_NETWORK: Registry[Any] = Registry()  # the default one fetches references from their addresses


def check_schema(constraints: OutputConstraints) -> None:
    """Refuse an invalid JSON Schema before sampling."""
    if constraints.json_schema is None:
        return
    param = constraints.format_param
    try:
        jsonschema.Draft202012Validator.check_schema(constraints.json_schema)
        resource = DRAFT202012.create_resource(constraints.json_schema)
        _require_references(resource, _NO_NETWORK.resolver_with_root(resource))
    except jsonschema.SchemaError as error:
        reason = f"{param}: not a valid JSON Schema: {error.message}"
        raise BadRequestError(reason, param=param) from error
    except Unresolvable as error:
        reason = f"{param}: the schema has no part {error.ref!r}, which its $ref names"
        raise BadRequestError(reason, param=param) from error
    except RecursionError as error:
        reason = f"{param}: the schema is nested too deeply: name its parts in $defs"
        raise BadRequestError(reason, param=param) from error


def check_tools(tools: Sequence[ToolSchema]) -> None:
    """Refuse tools that the ledger cannot keep before sampling."""
    for tool in tools:
        try:
            msgspec.msgpack.encode(tool.parameters)
        except OverflowError as error:
            reason = f"tools: the parameters of {tool.name!r} have an integer of more than 64 bits"
            raise BadRequestError(reason, param="tools") from error


def _require_references(resource: Resource[Any], resolver: Any) -> None:
    """Raise `Unresolvable` for a reference that leads out of the schema."""
    contents = resource.contents
    if isinstance(contents, dict) and isinstance(reference := contents.get("$ref"), str):
        resolver.lookup(reference)
    for inner in resource.subresources():
        _require_references(inner, resolver.in_subresource(inner))


class BrokenConstraint(NamedTuple):
    """Violation of a constraint: the field of the request that sets it, and the reason."""

    param: str
    reason: str


def broken_constraint(
    constraints: OutputConstraints, message: ChatMessage, stop_reason: StopReason
) -> BrokenConstraint | None:
    """Return the first constraint that a reply violates, if any."""
    if constraints is NO_CONSTRAINTS or stop_reason is StopReason.LENGTH:
        return None
    calls = message.tool_calls
    return _of_tools(constraints, calls) or (
        None if calls else _of_format(constraints, message.content)
    )


def _of_tools(constraints: OutputConstraints, calls: Sequence[ToolCall]) -> BrokenConstraint | None:
    if constraints.needs_tool_call and not calls:
        return BrokenConstraint("tool_choice", "the model called no tool")
    for call in calls:
        if constraints.tool_name and call.name != constraints.tool_name:
            reason = f"the model called {call.name!r}, not {constraints.tool_name!r}"
            return BrokenConstraint("tool_choice", reason)
    if constraints.max_tool_calls is not None and len(calls) > constraints.max_tool_calls:
        reason = f"the model made {len(calls)} calls at once"
        return BrokenConstraint("parallel_tool_calls", reason)
    return None


def _of_format(constraints: OutputConstraints, content: str) -> BrokenConstraint | None:
    if constraints.reply_format is ReplyFormat.TEXT:
        return None
    try:
        value: Any = msgspec.json.decode(content.encode())
    except UNREADABLE as error:
        return BrokenConstraint("response_format", f"the reply is not valid JSON: {error}")
    if constraints.reply_format is ReplyFormat.JSON_OBJECT and not isinstance(value, dict):
        return BrokenConstraint("response_format", "the reply is JSON, but not an object")
    if constraints.json_schema is not None:
        return _misfit(constraints.json_schema, value)
    return None


def _misfit(schema: dict[str, Any], value: Any) -> BrokenConstraint | None:
    """Return the first place where a reply does not fit; a check that does not end is one too."""
    validator = jsonschema.Draft202012Validator(schema, registry=_NO_NETWORK)
    try:
        with cpu_limit(_MAX_CHECK_S):
            misfit = jsonschema.exceptions.best_match(validator.iter_errors(value))
    except (RecursionError, TooSlowError) as error:
        reason = f"the schema cannot be compared with the reply ({type(error).__name__})"
        return BrokenConstraint("response_format", reason)
    if misfit is None:
        return None
    reason = f"the reply does not fit the schema at {misfit.json_path}: {misfit.message}"
    return BrokenConstraint("response_format", reason)


class ToolChoice(NamedTuple):
    """Requested use of tools. `any`: some tool is required; `tool`: the named one; `none`: text."""

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
    if choice.kind in ("auto", "none") and is_parallel:
        return NO_CONSTRAINTS
    return OutputConstraints(
        needs_tool_call=choice.kind in ("any", "tool"),
        tool_name=choice.name,
        max_tool_calls=None if is_parallel else 1,
    )
