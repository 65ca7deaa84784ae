"""When two messages are the same: role, content, canonical tool calls, the call answered.

Arguments of tool calls are compared as JSON values: order of keys and white space do not matter. Ids of
tool calls do. White space around a reply does not, since clients strip it. Reasoning is compared apart.
"""

from __future__ import annotations

import json
from functools import lru_cache

from tailrace_protos.chat import ChatMessage, ToolCall


def is_same_message(ours: ChatMessage, theirs: ChatMessage) -> bool:
    """Whether a client's message is the recorded one; thoughts and the tool's name aside."""
    if ours == theirs:
        return True
    if ours.role != theirs.role or ours.tool_call_id != theirs.tool_call_id:
        return False
    if ours.role == "assistant":
        return ours.content.strip() == theirs.content.strip() and _is_same_calls(
            ours.tool_calls, theirs.tool_calls
        )
    return ours.content == theirs.content and _is_same_calls(ours.tool_calls, theirs.tool_calls)


def is_same_reasoning(ours: ChatMessage, theirs: ChatMessage) -> bool:
    """Whether the thoughts agree, white space around them aside."""
    return ours.reasoning.strip() == theirs.reasoning.strip()


def _is_same_calls(ours: tuple[ToolCall, ...], theirs: tuple[ToolCall, ...]) -> bool:
    return len(ours) == len(theirs) and all(
        our.id == their.id
        and our.name == their.name
        and (
            our.arguments == their.arguments
            or canonical_arguments(our.arguments) == canonical_arguments(their.arguments)
        )
        for our, their in zip(ours, theirs, strict=True)
    )


@lru_cache(1024)
def canonical_arguments(arguments: str) -> str:
    """JSON with sorted keys and no white space; other text as it is; empty text is an empty object."""
    try:
        return json.dumps(json.loads(arguments or "{}"), sort_keys=True, separators=(",", ":"))
    except (RecursionError, ValueError):
        return arguments.strip()
