"""What the dialects of OpenAI share: messages, tools, response formats, log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace_gateway.core.body import Content, text_of
from tailrace_gateway.core.call import Choice, Completion, Promises, ReplyFormat
from tailrace_gateway.core.errors import InvalidRequestError, UnsupportedError
from tailrace_protos.chat import ChatMessage, ToolCall, ToolSchema

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}


class TokenText(Protocol):
    """Gives the text of single tokens, for log-probabilities."""

    def token_text(self, token_id: int) -> str:
        """Text of one token; broken characters are replaced by U+FFFD."""


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
    read = tuple(_message(message, f"messages[{i}]") for i, message in enumerate(messages))
    refuse_prefill(read)
    return read


def refuse_prefill(messages: Sequence[ChatMessage], param: str = "messages") -> None:
    """Refuse a conversation whose last word is the assistant's: sampled replies are never rewritten."""
    if messages and messages[-1].role == "assistant":
        raise UnsupportedError(
            f"{param}: the last one is an assistant's; a reply begun elsewhere is not continued here",
            param=param,
        )


def _message(message: InMessage, place: str) -> ChatMessage:
    role = ROLES.get(message.role)
    if role is None:
        param = f"{place}.role"
        raise InvalidRequestError(
            f"{param}: {message.role!r} is not one of {', '.join(ROLES)}", param=param
        )
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise UnsupportedError(f"{place}.{name} is not supported", param=f"{place}.{name}")
    if role == "tool" and not message.tool_call_id:
        param = f"{place}.tool_call_id"
        raise InvalidRequestError(f"{param} is missing in a message of the role tool", param=param)
    calls = message.tool_calls or ()
    return ChatMessage(
        role=role,
        content=text_of(message.content, f"{place}.content"),
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments) for call in calls
        ),
        tool_call_id=message.tool_call_id or "",
        name=message.name or "",
        reasoning=_reasoning(message),
    )


def _reasoning(message: InMessage) -> str:
    if message.role != "assistant":
        return ""
    if message.reasoning_content:
        return message.reasoning_content
    return message.reasoning if isinstance(message.reasoning, str) else ""


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


def tool_promises(choice: Any, parallel: bool | None, tools: Sequence[ToolSchema]) -> Promises:
    """What `tool_choice` and `parallel_tool_calls` ask for."""
    most = 1 if parallel is False else None
    name = _chosen_tool(choice)
    if name:
        if name not in {tool.name for tool in tools}:
            raise InvalidRequestError(f"tool_choice: there is no tool {name!r}", param="tool_choice")
        return Promises(needs_tool_call=True, tool_name=name, max_tool_calls=most)
    if choice == "required":
        if not tools:
            raise InvalidRequestError(
                "tool_choice: required, but there are no tools", param="tool_choice"
            )
        return Promises(needs_tool_call=True, max_tool_calls=most)
    if choice not in (None, "auto", "none"):
        raise UnsupportedError(f"tool_choice: {choice!r} is not supported", param="tool_choice")
    return Promises(forbids_tool_calls=choice == "none", max_tool_calls=most)


def _chosen_tool(choice: Any) -> str:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return ""
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else choice.get("name")
    return name if isinstance(name, str) else ""


def format_promise(wanted: dict[str, Any] | None, param: str = "response_format") -> dict[str, Any]:
    """Fields of `Promises` for a response format; `json_schema` may be nested or flat."""
    kind = (wanted or {}).get("type", "text")
    if wanted is None or kind == "text":
        return {}
    if kind == "json_object":
        return {"reply_format": ReplyFormat.JSON_OBJECT}
    if kind == "json_schema":
        nested = wanted.get("json_schema")
        schema = (nested if isinstance(nested, dict) else wanted).get("schema")
        if isinstance(schema, dict):
            return {"reply_format": ReplyFormat.JSON_SCHEMA, "json_schema": schema}
        raise InvalidRequestError(f"{param}: the schema is missing", param=param)
    raise UnsupportedError(f"{param}: type {kind!r} is not supported", param=param)


def logprob_entries(
    tokens: TokenText, token_ids: NDArray[np.int32], logprobs: NDArray[np.float32]
) -> list[dict[str, Any]]:
    """The sampled tokens with their log-probabilities, in the form of chat completions."""
    entries: list[dict[str, Any]] = []
    for token_id, logprob in zip(token_ids.tolist(), logprobs.tolist(), strict=True):
        text = tokens.token_text(token_id)
        raw = None if "\ufffd" in text else list(text.encode())
        entries.append({"token": text, "logprob": logprob, "bytes": raw, "top_logprobs": []})
    return entries


def usage_of(completion: Completion) -> dict[str, Any]:
    """Token counts in the form of chat completions and completions."""
    prompt, sampled = completion.num_prompt_tokens, completion.num_sampled
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
        "prompt_tokens_details": {"cached_tokens": completion.num_cached_tokens},
    }


def tool_calls_of(choice: Choice) -> list[dict[str, Any]]:
    """A reply's tool calls in the form of chat completions."""
    return [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in choice.message.tool_calls
    ]
