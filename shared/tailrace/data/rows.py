"""Form of a row, checked once, when it is loaded."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tailrace.config import ConfigError
from tailrace.data.config import DatasetEntry
from tailrace_protos.chat import ChatMessage

COMPLETED = frozenset(("agent_name", "tools", "tools_kwargs"))
"""Keys that a row has after its completion, whatever its source."""

_ROLES = ("system", "user", "assistant", "tool", "developer")


class Row(NamedTuple):
    """Row with its origin (`file:line`, for messages to the user)."""

    data: dict[str, Any]
    origin: str


def complete_row(data: object, origin: str, entry: DatasetEntry) -> Row:
    """Completes a row with the entry's defaults; `ConfigError` names origin and key of an error."""
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{origin}: a row must be an object with named keys, found {_kind(data)}")
    row = {**data, **_defaults(data, entry)}
    row["tools_kwargs"] = {**entry.tools_kwargs, **_mapping(row, "tools_kwargs", origin)}
    _check_keys(row, origin)
    row["tools"] = list(row["tools"])
    if "prompt" in row:
        row["prompt"] = _framed(row["prompt"], entry)
    _check_wire(row, origin)
    return Row(row, origin)


def _defaults(data: Mapping[str, Any], entry: DatasetEntry) -> dict[str, Any]:
    """Values of the keys that have a default, the row's own before the entry's."""
    own = {
        "agent_name": data.get("agent_name") or entry.agent_name or "single_turn_agent",
        "tools": entry.tools if data.get("tools") is None else data["tools"],
    }
    if source := entry.data_source or (entry.path if entry.is_hub else ""):
        own["data_source"] = data.get("data_source") or source
    return own


def renamed(data: object, columns: Mapping[str, str], origin: str) -> object:
    """A row of the source with its columns under the names that `columns` gives them."""
    if not columns or not isinstance(data, Mapping):
        return data
    taken = {column for column in columns.values() if "." not in column or column in data}
    row = {key: value for key, value in data.items() if key not in taken}
    return {**row, **{key: _column(data, name, origin) for key, name in columns.items()}}


def _column(data: Mapping[str, Any], name: str, origin: str) -> Any:
    if name in data:
        return data[name]
    found: Any = data
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            known = ", ".join(map(str, data))
            raise ConfigError(f"{origin}: there is no column {name!r}: correct `columns` ({known})")
        found = found[part]
    return found


def prompt_messages(row: Mapping[str, Any]) -> tuple[ChatMessage, ...]:
    """Messages of a row's prompt."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return (ChatMessage("user", prompt),)
    return tuple(ChatMessage(message["role"], message["content"]) for message in prompt)


def require_prompt(row: Row) -> None:
    """Raises `ConfigError` for a row without `prompt`, which the built-in agent loops need."""
    if "prompt" not in row.data:
        found = ", ".join(sorted(row.data.keys() - COMPLETED)) or "no key"
        raise ConfigError(
            f"{row.origin}: key 'prompt' is missing (found {found}): agent loop "
            f"{row.data['agent_name']!r} needs it; write a converter if it has another name"
        )


def _check_keys(row: Mapping[str, Any], origin: str) -> None:
    for key, check in _CHECKS.items():
        if key in row and (problem := check(row[key])):
            raise ConfigError(f"{origin}: key {key!r}: {problem}")


def _mapping(row: dict[str, Any], key: str, origin: str) -> Mapping[str, Any]:
    value = row.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{origin}: key {key!r}: must be an object, found {_kind(value)}")
    return {name: kwargs for name, kwargs in value.items() if kwargs is not None}


def _check_prompt(prompt: object) -> str:
    if isinstance(prompt, str):
        return "" if prompt else "is empty"
    if not isinstance(prompt, list) or not prompt:
        return f"must be text or a list of messages, found {_kind(prompt)}"
    for index, message in enumerate(prompt):
        if not isinstance(message, Mapping):
            return f"message {index} must be an object, found {_kind(message)}"
        if message.get("role") not in _ROLES:
            return f"message {index}: role must be one of {', '.join(_ROLES)}"
        if not isinstance(message.get("content"), str):
            return f"message {index}: content must be text, found {_kind(message.get('content'))}"
    return ""


def _check_name(name: object) -> str:
    return "" if isinstance(name, str) else f"must be text, found {_kind(name)}"


def _check_tools(tools: object) -> str:
    if isinstance(tools, list | tuple) and all(isinstance(name, str) for name in tools):
        return ""
    return "must be a list of tools' names"


def _check_tools_kwargs(kwargs: Any) -> str:
    wrong = [tool for tool, value in kwargs.items() if not isinstance(value, Mapping)]
    return f"must be an object for each tool, found another value for {wrong[0]!r}" if wrong else ""


_CHECKS: dict[str, Callable[[Any], str]] = {
    "prompt": _check_prompt,
    "agent_name": _check_name,
    "tools": _check_tools,
    "tools_kwargs": _check_tools_kwargs,
}


def _framed(prompt: Any, entry: DatasetEntry) -> Any:
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


def _check_wire(row: dict[str, Any], origin: str) -> None:
    """Raises `ConfigError` for values that cannot be sent to the reward service."""
    for key, value in row.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, OverflowError, UnicodeEncodeError) as error:
            raise ConfigError(
                f"{origin}: key {key!r}: {error}: use numbers, text, lists and objects"
            ) from error


def _kind(value: object) -> str:
    return "nothing" if value is None else type(value).__name__
