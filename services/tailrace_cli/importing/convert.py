"""Applying a system's table to one of its configurations (pure).

Invariant: every setting of the source is in the result, or among `unmapped` or `idle`; none is dropped
in silence but those that are null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tailrace.config.settings import Derived, Refused, Renamed, Setting
from tailrace.config.settings.setting import Lookup
from tailrace_cli.importing.environment_keys import check_environment_key
from tailrace_cli.importing.rules import NoEffectError, System

NO_EQUIVALENT = "has no equivalent"
ONLY_REFERRED_TO = "read by other settings alone, which have its value"


@dataclass
class Imported:
    """The experiment so far, and what of the source it lacks: reasons by dotted key.

    `idle` settings change nothing in their own system either.
    """

    content: dict[str, Any] = field(default_factory=dict)
    unmapped: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)


def convert(system: System, source: Mapping[str, Any]) -> Imported:
    """Our keys for a configuration of `system`."""
    known = _Known(system.settings)
    result = _Result(source)
    matches: list[tuple[Match, str, Any]] = []
    for name, value in _leaves("", source, known):
        matched = known.match(name)
        if matched is None:
            result.imported.unmapped[name] = known.reason(name)
        else:
            matches.append((matched, name, value))
    matches.sort(key=lambda each: each[0].place)
    for kind in (Refused, Renamed, Derived):
        for matched, name, value in matches:
            if isinstance(matched.setting, kind):
                result.apply(name, value, matched)
    return result.imported


class Match(NamedTuple):
    """A line of the table that a name fits."""

    place: int  # in the table
    setting: Setting
    stars: tuple[str, ...]  # what its `*` stand for


class _Known:
    """A table, by name."""

    def __init__(self, settings: tuple[Setting, ...]) -> None:
        self._plain: dict[str, Match] = {}
        self._patterns: list[tuple[tuple[str, ...], int, Setting]] = []
        for place, setting in enumerate(settings):
            if "*" in setting.name:
                self._patterns.append((tuple(setting.name.split(".")), place, setting))
            else:
                self._plain.setdefault(setting.name, Match(place, setting, ()))

    def match(self, name: str) -> Match | None:
        """The first line for `name`, those without `*` before those with one."""
        if name in self._plain:
            return self._plain[name]
        steps = tuple(name.split("."))
        for pattern, place, setting in self._patterns:
            if (stars := _stars(pattern, steps)) is not None:
                return Match(place, setting, stars)
        return None

    def reason(self, name: str) -> str:
        """Why `name` is unknown: what the table says of the section that it lies in."""
        parent = name.rpartition(".")[0]
        if not parent:
            return NO_EQUIVALENT
        matched = self.match(parent)
        if matched is not None and isinstance(matched.setting, Refused):
            return matched.setting.remedy
        return self.reason(parent)


def _stars(pattern: tuple[str, ...], steps: tuple[str, ...]) -> tuple[str, ...] | None:
    if len(pattern) != len(steps):
        return None
    if any(wanted not in ("*", step) for wanted, step in zip(pattern, steps, strict=True)):
        return None
    return tuple(step for wanted, step in zip(pattern, steps, strict=True) if wanted == "*")


def _leaves(name: str, value: Any, known: _Known) -> Iterator[tuple[str, Any]]:
    """Settings with their dotted names; a section that the table knows as a whole is one."""
    if value is None:
        return
    is_whole = known.match(name) if name else None
    if not isinstance(value, Mapping) or (is_whole and not isinstance(is_whole.setting, Refused)):
        yield name, value
        return
    for key, inner in value.items():
        yield from _leaves(f"{name}.{key}" if name else str(key), inner, known)


class _Result:
    """The experiment as it grows."""

    def __init__(self, source: Mapping[str, Any]) -> None:
        self._source = source
        self.imported = Imported()

    def lookup(self, key: str, default: Any = None) -> Any:
        """Our key as it is set already, else the source's setting of that name."""
        for content in (self.imported.content, self._source):
            if (value := at(content, key)) is not None:
                return value
        return default

    def apply(self, name: str, value: Any, matched: Match) -> None:
        """Set what the line sets; what it cannot is unmapped, with the reason."""
        try:
            for key, new in self._values(value, matched).items():
                self._set(_filled(key, matched.stars), new)
        except NoEffectError as error:
            self.imported.idle[name] = str(error)
        except (ValueError, TypeError) as error:  # TypeError: another type than that system has there
            self.imported.unmapped[name] = f"{value!r}: {error}"

    def _values(self, value: Any, matched: Match) -> Mapping[str, Any]:
        setting = matched.setting
        if isinstance(setting, Renamed):
            return dict.fromkeys(setting.sets, setting.convert(value))
        if isinstance(setting, Derived):
            return setting.derive(value, self._lookup_for(matched.stars))
        if value not in setting.harmless:
            raise ValueError(setting.remedy)
        return {}

    def _lookup_for(self, stars: tuple[str, ...]) -> Lookup:
        """`lookup` of keys whose `*` stand for what they stood for in the line's name."""
        return lambda key, default=None: self.lookup(_filled(key, stars), default)

    def _set(self, key: str, value: Any) -> None:
        check_environment_key(key, value, self.lookup)
        if (other := at(self.imported.content, key)) is not None:
            if value not in (other, {}):
                raise ValueError(f"{key} is {other!r} by another setting")
            return
        *parents, last = key.split(".")
        place = self.imported.content
        for step in parents:
            place = place.setdefault(step, {})
        place[last] = value


def at(content: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, None where there is none."""
    value: Any = content
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def _filled(key: str, stars: tuple[str, ...]) -> str:
    for star in stars:
        key = key.replace("*", star, 1)
    return key
