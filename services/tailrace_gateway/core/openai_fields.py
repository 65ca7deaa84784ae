"""What the dialects of OpenAI share in requests: messages and tools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace_gateway.core.body import Content, text_of
from tailrace_gateway.core.errors import InvalidRequestError, UnsupportedError
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class InFunction(msgspec.Struct, frozen=True):
    """A function of a tool call."""

    name: str
    arguments: str = "{}"


class InToolCall(msgspec.Struct, frozen=True):
    """A tool call in a message of the history."""

    id: str
    function: InFunction


class InMessage(msgspec.Struct, frozen=True):
    """A message of the history. Fields that clients echo and that say nothing are not looked at."""

    role: str
    content: Content = None
    tool_calls: list[InToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: Any = None
    function_call: Any = None
    audio: Any = None


class InSchema(msgspec.Struct, frozen=True):
    """A function that the model may call. `strict` is accepted and not enforced."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class InTool(msgspec.Struct, frozen=True):
    """A tool as chat completions write it."""

    type: str
    function: InSchema | None = None


def read_messages(messages: Sequence[InMessage]) -> tuple[ChatMessage, ...]:
    """The conversation so far; it must not end with an assistant's message."""
    if not messages:
        raise InvalidRequestError("messages: at least one is needed", param="messages")
    read = tuple([_message(message, index) for index, message in enumerate(messages)])
    refuse_prefill(read)
    return read


def refuse_prefill(messages: Sequence[ChatMessage], param: str = "messages") -> None:
    """Refuse a conversation whose last word is the assistant's: sampled replies are never rewritten."""
    if messages and messages[-1].role == "assistant":
        raise UnsupportedError(
            f"{param}: the last one is an assistant's; a reply begun elsewhere is not continued here",
            param=param,
        )


def _message(message: InMessage, index: int) -> ChatMessage:
    role, content = ROLES.get(message.role), message.content
    if role is None or message.function_call or message.audio:
        raise _refusal(message, f"messages[{index}]")
    if not isinstance(content, str):
        content = text_of(content, f"messages[{index}].content")
    if role == "assistant":
        return _said(message, content)
    if role == "tool" and not message.tool_call_id:
        param = f"messages[{index}].tool_call_id"
        raise InvalidRequestError(f"{param} is missing in a message of the role tool", param=param)
    return ChatMessage(role, content, tool_call_id=message.tool_call_id or "", name=message.name or "")


def _said(message: InMessage, content: str) -> ChatMessage:
    """What the assistant said, with its calls and thoughts."""
    calls = [
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
    ]
    reasoning = message.reasoning_content or message.reasoning
    return ChatMessage(
        "assistant",
        content,
        tuple(calls),
        name=message.name or "",
        reasoning=reasoning if isinstance(reasoning, str) else "",
    )


def _refusal(message: InMessage, place: str) -> InvalidRequestError:
    if message.role not in ROLES:
        reason = f"{place}.role: {message.role!r} is not one of {', '.join(ROLES)}"
        return InvalidRequestError(reason, param=f"{place}.role")
    param = f"{place}.{'function_call' if message.function_call else 'audio'}"
    return UnsupportedError(f"{param} is not supported", param=param)


def read_tools(tools: Sequence[InTool] | None) -> tuple[ToolSchema, ...]:
    """The functions that the model may call."""
    read = []
    for index, tool in enumerate(tools or ()):
        if tool.type != "function" or tool.function is None:
            param = f"tools[{index}].type"
            raise UnsupportedError(
                f"{param}: only functions are supported, not {tool.type!r}", param=param
            )
        read.append(schema_of(tool.function))
    return tuple(read)


def schema_of(function: InSchema) -> ToolSchema:
    """A function's schema; one without parameters takes none."""
    nothing = {"type": "object", "properties": {}}
    return ToolSchema(function.name, function.description or "", function.parameters or nothing)
