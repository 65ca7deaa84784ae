"""Form of a row, checked once, when it is loaded."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from tailrace.config import ConfigError
from tailrace.data.config import DatasetEntry
from tailrace.data.prompts import check_prompt, framed, kind_of

COMPLETED = frozenset(("agent_name", "tools", "tools_kwargs"))
"""Keys that a row has after its completion, whatever its source."""


class Row(NamedTuple):
    """Row with its origin (`file:line`, for messages to the user)."""

    data: dict[str, Any]
    origin: str


def complete_row(data: object, origin: str, entry: DatasetEntry) -> Row:
    """Completes a row with the entry's defaults; `ConfigError` names origin and key of an error."""
    if not isinstance(data, Mapping) or not all(isinstance(key, str) for key in data):
        raise ConfigError(f"{origin}: a row must be an object with named keys, found {kind_of(data)}")
    row = {**data, **_defaults(data, entry)}
    row["tools_kwargs"] = {**entry.tools_kwargs, **_mapping(row, "tools_kwargs", origin)}
    _check_keys(row, origin)
    row["tools"] = list(row["tools"])
    if "prompt" in row:
        row["prompt"] = framed(row["prompt"], entry)
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
        raise ConfigError(f"{origin}: key {key!r}: must be an object, found {kind_of(value)}")
    return {name: kwargs for name, kwargs in value.items() if kwargs is not None}


def _check_name(name: object) -> str:
    return "" if isinstance(name, str) else f"must be text, found {kind_of(name)}"


def _check_tools(tools: object) -> str:
    if isinstance(tools, list | tuple) and all(isinstance(name, str) for name in tools):
        return ""
    return "must be a list of tools' names"


def _check_tools_kwargs(kwargs: Any) -> str:
    wrong = [tool for tool, value in kwargs.items() if not isinstance(value, Mapping)]
    return f"must be an object for each tool, found another value for {wrong[0]!r}" if wrong else ""


_CHECKS: dict[str, Callable[[Any], str]] = {
    "prompt": check_prompt,
    "agent_name": _check_name,
    "tools": _check_tools,
    "tools_kwargs": _check_tools_kwargs,
}


def _check_wire(row: dict[str, Any], origin: str) -> None:
    """Raises `ConfigError` for values that cannot be sent to the reward service."""
    for key, value in row.items():
        try:
            msgspec.msgpack.encode(value)
        except (TypeError, OverflowError, UnicodeEncodeError, RecursionError) as error:
            raise ConfigError(
                f"{origin}: key {key!r}: {error}: use numbers, text, lists and objects"
            ) from error
