"""Which tools a reply may or must call, in the words that all dialects are read into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from tailrace_gateway.core.call import Promises
from tailrace_gateway.core.errors import InvalidRequestError
from tailrace_protos.chat import ToolSchema


class ToolChoice(NamedTuple):
    """`any`: some tool has to be called; `tool`: the one of that name; `none`: no tool at all."""

    kind: Literal["auto", "any", "tool", "none"] = "auto"
    name: str = ""


def tool_promises(
    choice: ToolChoice, tools: Sequence[ToolSchema], *, is_parallel: bool = True
) -> Promises:
    """What a reply is checked against; without `is_parallel` it makes one call at the most."""
    if choice.kind == "tool" and choice.name not in {tool.name for tool in tools}:
        raise InvalidRequestError(f"tool_choice: there is no tool {choice.name!r}", param="tool_choice")
    if choice.kind == "any" and not tools:
        reason = "tool_choice: a call is required, but there are no tools"
        raise InvalidRequestError(reason, param="tool_choice")
    return Promises(
        needs_tool_call=choice.kind in ("any", "tool"),
        forbids_tool_calls=choice.kind == "none",
        tool_name=choice.name,
        max_tool_calls=None if is_parallel else 1,
    )
