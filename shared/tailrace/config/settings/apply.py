"""Applying the table to what an experiment file says (pure)."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tailrace.config.base import ConfigError
from tailrace.config.settings.setting import Derived, Refused, Renamed, Setting
from tailrace.config.settings.table import SETTINGS


class Applied(NamedTuple):
    """An experiment as services read it."""

    content: dict[str, Any]
    set_by: dict[str, str]  # by our key: the name that it was given by

    def as_given(self, message: str) -> str:
        """`message`, with the names that the user gave to the keys that it speaks of."""
        found = {name: None for key, name in self.set_by.items() if _speaks_of(message, key)}
        return f"{message} (given as {', '.join(found)})" if found else message


def _speaks_of(message: str, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}\b", message) is not None


def apply_settings(
    content: Mapping[str, Any], source: str, settings: Sequence[Setting] = SETTINGS
) -> Applied:
    """`content` with every setting of the table under the key that a service reads.

    Null is the same as not given. Raises `ConfigError` naming the setting, `source` and the remedy.
    """
    by_name = {setting.name: setting for setting in settings}
    roots = {name.partition(".")[0] for name in by_name}
    given = {
        name: value
        for root in content
        if root in roots
        for name, value in _given(root, content[root], by_name, source)
    }
    target = _Target({key: copy.deepcopy(content[key]) for key in content if key not in roots}, source)
    for kind in (Refused, Renamed, Derived):
        for setting in settings:
            if isinstance(setting, kind) and setting.name in given:
                _apply(setting, given[setting.name], target, source)
    return Applied(target.content, target.set_by)


def _given(
    name: str, value: Any, by_name: Mapping[str, Setting], source: str
) -> Iterator[tuple[str, Any]]:
    """The settings that stand at and below `name`."""
    if value is None:
        return
    below = sorted({key[len(name) + 1 :].partition(".")[0] for key in by_name if _is_below(key, name)})
    if name in by_name and not (below and value):  # of a section, `{}` alone is a setting
        yield name, value
        return
    if not below:
        parent, _, key = name.rpartition(".")
        raise ConfigError(f"{source}: unknown key {name!r}; {_remedy(key, parent, by_name)}")
    if not isinstance(value, Mapping):
        raise ConfigError(f"{source}: {name}: expected keys ({', '.join(below)}), found {value!r}")
    for key, inner in value.items():
        yield from _given(f"{name}.{key}", inner, by_name, source)


def _is_below(key: str, name: str) -> bool:
    return key.startswith(f"{name}.")


def _remedy(key: str, parent: str, by_name: Mapping[str, Setting]) -> str:
    valid = {name[len(parent) + 1 :].partition(".")[0] for name in by_name if _is_below(name, parent)}
    near = difflib.get_close_matches(key, valid, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else f"valid keys: {', '.join(sorted(valid))}"


def _apply(setting: Setting, value: Any, target: _Target, source: str) -> None:
    try:
        if isinstance(setting, Renamed):
            converted = setting.convert(value)
            values = dict.fromkeys(setting.sets, converted)
        elif isinstance(setting, Derived):
            values = dict(setting.derive(value, target.lookup))
            assert values.keys() <= set(setting.sets)
        else:
            _check_harmless(setting, value)
            values = {}
    except ValueError as error:
        raise ConfigError(f"{source}: {setting.name}: {error}") from error
    for key, new in values.items():
        target.set(key, new, setting.name)


def _check_harmless(setting: Refused, value: Any) -> None:
    if not any(value == harmless for harmless in setting.harmless):
        raise ValueError(f"{value!r} has no meaning here: {setting.remedy}")


class _Target:
    """The experiment as services read it, and which setting each of its keys comes from."""

    def __init__(self, content: dict[str, Any], source: str) -> None:
        self.content = content
        self._source = source
        self.set_by: dict[str, str] = {}

    def lookup(self, key: str, default: Any = None) -> Any:
        """See `Lookup`."""
        value: Any = self.content
        for step in key.split("."):
            value = value.get(step) if isinstance(value, Mapping) else None
        return default if value is None else value

    def set(self, key: str, value: Any, name: str) -> None:
        """Write `value` at `key` for the setting `name`; `ConfigError` where it is given twice."""
        if self.lookup(key) is not None:
            other = self.set_by.get(key, key)
            raise ConfigError(
                f"{self._source}: {name} and {other} are both given and mean the same: keep one of them"
            )
        self.set_by[key] = name
        *parents, last = key.split(".")
        place = self.content
        for step in parents:
            place = self._descend(place, step, name)
        place[last] = value

    def _descend(self, place: dict[str, Any], step: str, name: str) -> dict[str, Any]:
        inner = place.get(step)
        if inner is None:
            inner = place[step] = {}
        if not isinstance(inner, dict):
            raise ConfigError(f"{self._source}: {name}: {step} holds {inner!r} instead of keys")
        return inner
