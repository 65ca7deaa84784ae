"""LangChain's messages in OpenAI's form and back.

Invariant: a reply that comes back in a later call has the content, the thoughts and the tool calls that
it was read with, so that the gateway knows it again.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, InvalidToolCall, ToolCall
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.messages.utils import convert_to_openai_messages
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call

REASONING = "reasoning_content"


def to_openai(messages: Sequence[BaseMessage]) -> list[dict[str, Any]]:
    """Converts messages to the form of chat completions."""
    return [_to_openai(message) for message in messages]


def _to_openai(message: BaseMessage) -> dict[str, Any]:
    converted = convert_to_openai_messages(message)
    if not isinstance(message, AIMessage):
        return converted
    converted.pop("name", None)
    if thoughts := message.additional_kwargs.get(REASONING):
        converted[REASONING] = thoughts
    if message.invalid_tool_calls:
        calls = converted.setdefault("tool_calls", [])
        calls += [_raw_call(call) for call in message.invalid_tool_calls]
    return converted


def _raw_call(call: InvalidToolCall) -> dict[str, Any]:
    function = {"name": call["name"] or "", "arguments": call["args"] or ""}
    return {"type": "function", "id": call["id"], "function": function}


def to_message(
    reply: Mapping[str, Any],
    completion_id: str,
    usage: UsageMetadata | None,
    metadata: Mapping[str, Any],
) -> AIMessage:
    """Converts an assistant's message of OpenAI's form; it keeps the completion's id, for rewards."""
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for raw in reply.get("tool_calls") or ():
        try:
            calls.append(parse_tool_call(raw, return_id=True))  # type: ignore[arg-type]
        except OutputParserException as error:
            invalid.append(make_invalid_tool_call(raw, str(error)))
    return AIMessage(
        content=reply.get("content") or "",
        tool_calls=calls,
        invalid_tool_calls=invalid,
        additional_kwargs=_thoughts(reply),
        usage_metadata=usage,
        response_metadata=dict(metadata),
        id=completion_id,
    )


def to_chunk(
    delta: Mapping[str, Any], completion_id: str, metadata: Mapping[str, Any]
) -> AIMessageChunk:
    """A piece of a streamed reply."""
    calls = [
        tool_call_chunk(
            name=(raw.get("function") or {}).get("name"),
            args=(raw.get("function") or {}).get("arguments"),
            id=raw.get("id"),
            index=raw.get("index"),
        )
        for raw in delta.get("tool_calls") or ()
    ]
    return AIMessageChunk(
        content=delta.get("content") or "",
        tool_call_chunks=calls,
        additional_kwargs=_thoughts(delta),
        response_metadata=dict(metadata),
        id=completion_id,
    )


def _thoughts(reply: Mapping[str, Any]) -> dict[str, Any]:
    return {REASONING: reply[REASONING]} if reply.get(REASONING) else {}


def to_usage(usage: Mapping[str, Any] | None) -> UsageMetadata | None:
    """Token counts."""
    if not usage:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        input_token_details={"cache_read": cached},
    )


def to_tool_choice(choice: str | bool | Mapping[str, Any] | None) -> Any:
    """LangChain's ways to say which tool the model must call, as OpenAI's."""
    if choice in (True, "any"):
        return "required"
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        return {"type": "function", "function": {"name": choice}}
    return choice
