"""Prompts of rows: text, or messages as APIs of models take them, with tool calls of earlier turns."""

from collections.abc import Mapping
from typing import Any

import msgspec

from tailrace.data.config import DatasetEntry
from tailrace_protos.chat import ChatMessage, ToolCall

_ROLES = ("system", "user", "assistant", "tool", "developer")


def prompt_messages(row: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    """Messages of a row's prompt."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return (ChatMessage("user", prompt),)
    return tuple(map(_message, prompt))


def _message(given: Mapping[str, Any]) -> ChatMessage:
    return ChatMessage(
        given["role"],
        given.get("content") or "",
        tuple(map(_tool_call, given.get("tool_calls") or ())),
        tool_call_id=given.get("tool_call_id") or "",
        name=given.get("name") or "",
    )


def _tool_call(given: Mapping[str, Any]) -> ToolCall:
    function = given["function"]
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolCall(given.get("id") or "", function["name"], text)


def check_prompt(prompt: object) -> str:
    """Problem of a prompt; empty without one."""
    if isinstance(prompt, str):
        return "" if prompt else "is empty"
    if not isinstance(prompt, list) or not prompt:
        return f"must be text or a list of messages, found {kind_of(prompt)}"
    for index, message in enumerate(prompt):
        if problem := _problem(message):
            return f"message {index}{problem}"
    return ""


def _problem(message: object) -> str:
    if not isinstance(message, Mapping):
        return f" must be an object, found {kind_of(message)}"
    if message.get("role") not in _ROLES:
        return f": role must be one of {', '.join(_ROLES)}"
    if not _are_calls(calls := message.get("tool_calls")):
        return ": tool_calls must be a list of {id, function: {name, arguments}}"
    content = message.get("content")
    if not isinstance(content, str) and not (content is None and calls):
        return f": content must be text, found {kind_of(content)}"
    wrong = next((key for key in ("tool_call_id", "name") if not _is_text(message.get(key))), None)
    return f": {wrong} must be text, found {kind_of(message[wrong])}" if wrong else ""


def _are_calls(calls: object) -> bool:
    return not calls or (isinstance(calls, list) and all(map(_is_call, calls)))


def _is_call(call: object) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return (
        isinstance(call, Mapping)
        and isinstance(function, Mapping)
        and _is_text(call.get("id"))
        and isinstance(function.get("name"), str)
        and isinstance(function.get("arguments"), str | Mapping | None)
    )


def _is_text(value: object) -> bool:
    return value is None or isinstance(value, str)


def framed(prompt: Any, entry: DatasetEntry) -> Any:
    """Prompt with the entry's system message and instruction."""
    if entry.system_prompt:
        prompt = _with_system(prompt, entry.system_prompt)
    return _with_instruction(prompt, entry.instruction) if entry.instruction else prompt


def _with_system(prompt: Any, system: str) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    if messages[0]["role"] == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


def _with_instruction(prompt: Any, instruction: str) -> Any:
    if isinstance(prompt, str):
        return f"{prompt.rstrip()}\n\n{instruction}"
    asked = max((index for index, one in enumerate(prompt) if one["role"] == "user"), default=None)
    if asked is None:
        return [*prompt, {"role": "user", "content": instruction}]
    message = prompt[asked]
    message = {**message, "content": _with_instruction(message["content"], instruction)}
    return [*prompt[:asked], message, *prompt[asked + 1 :]]


def kind_of(value: object) -> str:
    """Type of a value, for messages."""
    return "nothing" if value is None else type(value).__name__
