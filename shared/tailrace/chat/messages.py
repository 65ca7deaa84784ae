"""Messages and tools in the form that chat templates expect: dicts as in the OpenAI API.

Invariant: a key without a value is absent, because templates test if keys are defined.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema


def template_messages(
    messages: Sequence[ChatMessage], *, arguments_as_text: bool
) -> list[dict[str, Any]]:
    """Converts messages to dicts; a tool's answer without the tool's name gets it from the call."""
    names: dict[str, str] = {}
    made = []
    for message in messages:
        names.update((call.id, call.name) for call in message.tool_calls)
        made.append(_template_message(message, names, arguments_as_text))
    return made


def template_tools(tools: Sequence[ToolSchema]) -> list[dict[str, Any]] | None:
    """Converts tools to OpenAI functions; None without tools, because templates test for None."""
    if not tools:
        return None
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters,
            },
        }
        for tool in tools
    ]


def _template_message(
    message: ChatMessage, names: dict[str, str], arguments_as_text: bool
) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        made["tool_calls"] = list(_template_calls(message.tool_calls, arguments_as_text))
    if message.reasoning:
        made["reasoning_content"] = message.reasoning
        if not (message.tool_calls and message.content):  # harmony has one place for both
            made["thinking"] = message.reasoning
    name = message.name or names.get(message.tool_call_id, "")
    if name:
        made["name"] = name
    if message.tool_call_id:
        made["tool_call_id"] = message.tool_call_id
    return made


def _template_calls(calls: Iterable[ToolCall], arguments_as_text: bool) -> Iterable[dict[str, Any]]:
    for call in calls:
        arguments = call.arguments if arguments_as_text else _parsed(call.arguments)
        yield {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": arguments},
        }


def _parsed(arguments: str) -> Any:
    """Parses arguments to an object; other text stays unchanged."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
