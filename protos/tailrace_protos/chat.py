"""Conversations as text: messages, tool calls that a model made, tools that it may call."""

from typing import Any

import msgspec


class ToolCall(msgspec.Struct, frozen=True, gc=False):
    """A call that a model asked for; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One message of a conversation.

    `reasoning` is what an assistant thought before it answered, without its markers. A message of the
    role `tool` answers the call `tool_call_id` of the tool `name`.
    """

    role: str
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""
    reasoning: str = ""


class ToolSchema(msgspec.Struct, frozen=True):
    """A tool as a model is told of it; `parameters` is the JSON Schema of its arguments."""

    name: str
    description: str
    parameters: dict[str, Any]
