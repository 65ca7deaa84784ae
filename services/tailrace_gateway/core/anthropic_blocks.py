"""Anthropic content blocks in requests, converted to messages."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace_gateway.core.body import Content, text_of
from tailrace_gateway.core.errors import BadRequestError, UnsupportedError
from tailrace_protos.chat import ChatMessage, ToolCall


class Block(msgspec.Struct, frozen=True):
    """Content block; its `type` decides which fields it has."""

    type: str
    text: str | None = None
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: Content = None
    is_error: bool | None = None


Blocks = list[Block]


class InAnthropicMessage(msgspec.Struct, frozen=True):
    """Message of the history."""

    role: str
    content: str | Blocks


def read_system(system: str | Blocks | None, place: str = "system") -> str:
    """Return a system prompt as one text."""
    if system is None or isinstance(system, str):
        return system or ""
    return "\n".join(_text(block, f"{place}[{i}]") for i, block in enumerate(system))


def read_anthropic_messages(messages: Sequence[InAnthropicMessage]) -> tuple[ChatMessage, ...]:
    """Return the conversation, which may end with any message."""
    if not messages:
        raise BadRequestError("messages: at least one message is required", param="messages")
    read: list[ChatMessage] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        if message.role == "user":
            read += _user(message.content, f"{place}.content")
        elif message.role == "assistant":
            read.append(_assistant(message.content, f"{place}.content"))
        elif message.role == "system":
            read.append(ChatMessage("system", read_system(message.content, f"{place}.content")))
        else:
            param = f"{place}.role"
            reason = f"{param}: {message.role!r} is not user, assistant or system"
            raise BadRequestError(reason, param=param)
    return tuple(read)


def _user(content: str | Blocks, place: str) -> list[ChatMessage]:
    """Return the tool results first, since they answer the preceding calls, then the user's text."""
    if isinstance(content, str):
        return [ChatMessage("user", content)]
    results = [
        ChatMessage(
            "tool",
            _result(block, f"{place}[{i}]"),
            tool_call_id=_required(block.tool_use_id, f"{place}[{i}].tool_use_id"),
        )
        for i, block in enumerate(content)
        if block.type == "tool_result"
    ]
    texts = [
        _text(block, f"{place}[{i}]") for i, block in enumerate(content) if block.type != "tool_result"
    ]
    return [*results, ChatMessage("user", "\n".join(texts))] if texts or not results else results


def _assistant(content: str | Blocks, place: str) -> ChatMessage:
    if isinstance(content, str):
        return ChatMessage("assistant", content)
    texts, reasoning, calls = [], [], []
    for index, block in enumerate(content):
        one = f"{place}[{index}]"
        if block.type == "thinking":
            reasoning.append(block.thinking)
        elif block.type == "tool_use":
            call_id, name = _required(block.id, f"{one}.id"), _required(block.name, f"{one}.name")
            calls.append(ToolCall(call_id, name, _arguments(block.input)))
        elif block.type != "redacted_thinking":  # only Anthropic can read it
            texts.append(_text(block, one))
    return ChatMessage("assistant", "\n".join(texts), tuple(calls), reasoning="\n".join(reasoning))


def _required(value: str, param: str) -> str:
    if not value:
        raise BadRequestError(f"{param} is missing", param=param)
    return value


def _arguments(given: Any) -> str:
    """Return the arguments of a tool call as the text that the model wrote."""
    if isinstance(given, dict) and set(given) == {"_raw"} and isinstance(given["_raw"], str):
        return given["_raw"]
    return msgspec.json.encode(given if given is not None else {}).decode()


def _result(block: Block, place: str) -> str:
    """Return the text of a tool's result; a failed one begins with `Error`, for the model."""
    text = text_of(block.content, f"{place}.content")
    if not block.is_error or text[:5].lower() == "error":
        return text
    return f"Error: {text}" if text else "Error"


def _text(block: Block, place: str) -> str:
    if block.type != "text":
        reason = f"{place}: blocks of type {block.type!r} are not supported: the model reads text only"
        raise UnsupportedError(reason, param=place)
    if block.text is None:
        raise BadRequestError(f"{place}.text is missing", param=f"{place}.text")
    return block.text
