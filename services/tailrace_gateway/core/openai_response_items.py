"""Items of OpenAI's responses dialect: input items to messages, replies to output items."""

from collections.abc import Sequence
from typing import Any

import msgspec

from tailrace_gateway.core.body import Content, TextPart, text_of
from tailrace_gateway.core.call import ItemReference, ReplyChoice
from tailrace_gateway.core.errors import BadRequestError, UnsupportedError
from tailrace_gateway.core.openai_answers import TokenText, logprob_entries
from tailrace_gateway.core.openai_request import ROLES
from tailrace_protos.chat import ChatMessage, ToolCall


class InItem(msgspec.Struct, frozen=True):
    """Input item; its `type` decides which fields it has."""

    type: str = "message"
    id: str | None = None
    role: str = ""
    content: Content = None
    summary: list[TextPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = "{}"
    output: Content = None


def read_items(items: str | Sequence[InItem]) -> tuple[ChatMessage | ItemReference, ...]:
    """Return the new items of a request, each as a message or as a reference."""
    if isinstance(items, str):
        return (ChatMessage("user", items),)
    return tuple(
        ItemReference(item.id or "", f"input[{index}].id")
        if item.type == "item_reference"
        else _message(item, f"input[{index}]")
        for index, item in enumerate(items)
    )


def _message(item: InItem, place: str) -> ChatMessage:
    if item.type == "message":
        return _text_message(item, place)
    if item.type == "function_call":
        call = ToolCall(_call_id(item, place), item.name, item.arguments or "{}")
        return ChatMessage("assistant", tool_calls=(call,))
    if item.type == "function_call_output":
        text = text_of(item.output, f"{place}.output")
        return ChatMessage("tool", text, tool_call_id=_call_id(item, place))
    if item.type == "reasoning":
        return ChatMessage("assistant", reasoning=_reasoning(item))
    param = f"{place}.type"
    raise UnsupportedError(f"{param}: items of type {item.type!r} are not supported here", param=param)


def _text_message(item: InItem, place: str) -> ChatMessage:
    role = ROLES.get(item.role)
    if role is None or role == "tool":
        param = f"{place}.role"
        reason = f"{param}: {item.role!r} is not system, developer, user or assistant"
        raise BadRequestError(reason, param=param)
    return ChatMessage(role, text_of(item.content, f"{place}.content"))


def _reasoning(item: InItem) -> str:
    """Return the reasoning text; the summary if the item has no content."""
    if isinstance(item.content, str):
        return item.content
    return "\n".join(part.text or "" for part in item.content or item.summary or ())


def _call_id(item: InItem, place: str) -> str:
    if not item.call_id:
        raise BadRequestError(f"{place}.call_id is missing", param=f"{place}.call_id")
    return item.call_id


def output_items(
    choice: ReplyChoice, token_text: TokenText, *, with_logprobs: bool
) -> list[dict[str, Any]]:
    """Return the output items of a reply. One without tool calls has a message, empty or not: clients
    may leave out the reasoning, and what remains in their history must still stand for the reply."""
    message, suffix = choice.message, choice.completion_id
    items: list[dict[str, Any]] = []
    if message.reasoning:
        items.append(reasoning_item(suffix, message.reasoning))
    if message.content or not message.tool_calls:
        part = text_part(message.content)
        if with_logprobs:
            part["logprobs"] = logprob_entries(token_text, choice, no_bytes=[])  # never null here
        items.append(message_item(suffix, [part]))
    return [*items, *map(call_item, message.tool_calls)]


def reasoning_item(suffix: str, text: str, status: str = "completed") -> dict[str, Any]:
    """Return a reasoning item."""
    content = [{"type": "reasoning_text", "text": text}] if text else []
    return {
        "id": f"rs_{suffix}",
        "type": "reasoning",
        "summary": [],
        "content": content,
        "status": status,
    }


def message_item(suffix: str, parts: list[dict[str, Any]], status: str = "completed") -> dict[str, Any]:
    """Return a message item."""
    return {
        "id": f"msg_{suffix}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": parts,
    }


def text_part(text: str) -> dict[str, Any]:
    """Return the content part of a message item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(call: ToolCall, status: str = "completed") -> dict[str, Any]:
    """Return a function call item."""
    return {
        "id": f"fc_{call.id}",
        "type": "function_call",
        "call_id": call.id,
        "name": call.name,
        "arguments": call.arguments,
        "status": status,
    }
