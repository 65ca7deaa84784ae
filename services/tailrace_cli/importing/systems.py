"""The systems whose configurations we translate, and the settings by which one knows them."""

import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from tailrace.config.settings import Refused, Rule, value_at
from tailrace_cli.importing.areal.settings import AREAL
from tailrace_cli.importing.roll.settings import ROLL
from tailrace_cli.importing.rules import System
from tailrace_cli.importing.verl.settings import VERL

SYSTEMS: dict[str, System] = {system.name: system for system in (ROLL, VERL, AREAL)}
_UNKNOWN_KEY = re.compile(r"unknown key '([^']+)'")
_MAX_NAMED = 3
_OF_COMPOSITION = ("defaults", "hydra")
_FEWEST, _SHARE = 8, 0.33  # of a file's settings that another system has; our own have up to 0.2


def rules_named(name: str) -> Iterator[tuple[System, Rule]]:
    """Yields the rules for a setting, with the systems that have it."""
    for system in SYSTEMS.values():
        yield from ((system, rule) for rule in system.rules if rule.name == name)


def with_system(problem: str, content: Mapping[str, Any]) -> str:
    """Problem of an experiment; for a setting or section of another system, with the way out."""
    unknown = _UNKNOWN_KEY.match(problem)
    systems = _systems_of(unknown[1], content) if unknown else []
    if unknown is None or not systems:
        return problem
    key = unknown[1]
    titles = " and ".join(system.title for system in systems)
    commands = " or ".join(f"`tailrace import-config {system.name} FILE`" for system in systems)
    ours = "".join(f"; {name} is {key} here" for name, key in _known(key, content))
    return f"unknown key {key!r}, which is of {titles}: {commands} translates a configuration{ours}"


def _systems_of(key: str, content: Mapping[str, Any]) -> list[System]:
    """The systems with a setting that is given at or below a key; without one, those with the key."""
    given = list(_names_below(key, value_at(content, key)))
    having = [each for each in SYSTEMS.values() if any(_has(each, name) for name in given)]
    return having or [each for each in SYSTEMS.values() if _has(each, key)]


def whole_file_hint(content: Mapping[str, Any], path: str) -> str:
    """Way out for a file that seems to be of another system; empty for any other."""
    names = [
        name
        for key, value in content.items()
        if key not in _OF_COMPOSITION
        for name in _names_below(str(key), value)
    ]
    for system in SYSTEMS.values() if len(names) >= _FEWEST else ():
        if sum(_has(system, name) for name in names) >= _SHARE * len(names):
            return (
                f"if it is a configuration of {system.title}, `tailrace import-config {system.name} "
                f"{path} -o experiment.yaml` translates it"
            )
    return ""


def _has(system: System, key: str) -> bool:
    """Tells whether a system has a setting of this name, or below it."""
    names = {entry.name for entry in (*system.rules, *system.defaults)}
    patterns = [pattern for pattern in system.harmless if not pattern.startswith("*")]
    return any(name == key or name.startswith(f"{key}.") for name in (*names, *patterns)) or any(
        fnmatchcase(key, pattern) for pattern in patterns
    )


def _known(key: str, content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The given settings at or below a key that have one of ours, if they are few."""
    found = [
        (name, ", ".join(rule.sets))
        for name in dict.fromkeys(_names_below(key, value_at(content, key)))
        for _, rule in list(rules_named(name))[:1]
        if rule.sets and not isinstance(rule, Refused)
    ]
    return found if len(found) <= _MAX_NAMED else []


def _names_below(key: str, value: Any) -> Iterator[str]:
    if not isinstance(value, Mapping):
        yield key
        return
    for name, below in value.items():
        yield from _names_below(f"{key}.{name}", below)
