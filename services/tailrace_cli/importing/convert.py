"""Converts a configuration of another system with its tables and defaults (pure).

Invariants: every setting of the source is in the result, or among `unmapped` or `idle`; a setting of
the source, null too, is never replaced by a default.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import msgspec

from tailrace.config import SECTIONS, RunConfig
from tailrace.config.keys import alternatives, type_at
from tailrace.config.settings import Lookup, apply, set_at, value_at
from tailrace.config.suggestions import not_one_of
from tailrace_cli.experiment import Experiment
from tailrace_cli.importing.rules import Default, System
from tailrace_envs import env_config_kind

_ENV_CONFIG = re.compile(r"agents\.custom_envs\.(.+)\.env_config\.([^.]+)")


@dataclass
class Imported:
    """An experiment, and the settings of the source that it lacks: reasons by dotted name.

    `idle` settings change nothing in their own system either.
    """

    content: dict[str, Any] = field(default_factory=dict)
    unmapped: dict[str, str] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)


def convert(system: System, source: Mapping[str, Any]) -> Imported:
    """Returns our keys for a configuration of `system`."""
    applied = apply(system.table, source, check=check_env_key)
    unmapped = dict(applied.unknown)
    for name, (value, reason) in applied.problems.items():
        shown = repr(value)
        unmapped[name] = reason if reason.startswith(shown) else f"{shown}: {reason}"
    return Imported(applied.content, unmapped, applied.idle)


def check_env_key(key: str, value: Any, lookup: Lookup) -> None:
    """Raises `ValueError` if our dotted `key` is one of an `env_config` whose type does not take it.

    The check of the whole experiment finds values that do not fit together.
    """
    found = _ENV_CONFIG.fullmatch(key)
    env_type = lookup(f"agents.custom_envs.{found.group(1)}.env_type") if found else None
    kind = env_config_kind(str(env_type))
    if found is None or kind is None:
        return
    fields = {field.name: field.type for field in msgspec.structs.fields(kind)}
    name = found.group(2)
    if name not in fields:
        raise ValueError(f"env_type {env_type}: {not_one_of(repr(name), fields)}")
    try:
        msgspec.convert(value, fields[name])
    except msgspec.ValidationError as error:
        raise ValueError(f"env_type {env_type}: {name}: {error}") from error


def completed(
    settings: Mapping[str, Any], defaults: Iterable[Default]
) -> tuple[dict[str, Any], tuple[Default, ...]]:
    """Returns the settings with the defaults of missing ones, and these defaults.

    A setting that is null is not missing.
    """
    complete = _copied(settings)
    added = tuple(default for default in defaults if _is_missing(settings, default))
    for default in added:
        set_at(complete, default.name, default.value)
    return complete, added


def add_always(imported: Imported, always: Mapping[str, Any]) -> tuple[str, ...]:
    """Sets keys that no rule has set, and returns them; keys of a critic only if there is one."""
    added = []
    for key, value in always.items():
        of_critic = key.startswith("learner.critic.")
        has_place = not of_critic or value_at(imported.content, "learner.critic") is not None
        if has_place and value_at(imported.content, key) is None:
            set_at(imported.content, key, value)
            added.append(key)
    return tuple(added)


def with_integers(content: Mapping[str, Any]) -> dict[str, Any]:
    """Coerces whole floats (`1e3`) to integers where a key of the experiment takes only integers."""
    hints = get_type_hints(Experiment)
    sections = {field.name: hints[field.name] for field in dataclasses.fields(Experiment)}
    run = msgspec.inspect.type_info(RunConfig)
    return {
        key: _coerced(
            value, msgspec.inspect.type_info(sections[key]) if key in SECTIONS else type_at(run, key)
        )
        for key, value in content.items()
    }


def _coerced(value: Any, info: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _coerced(inner, type_at(info, str(key))) for key, inner in value.items()}
    kinds = {type(each) for each in alternatives(info)}
    takes_integers = msgspec.inspect.IntType in kinds and msgspec.inspect.FloatType not in kinds
    if takes_integers and isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copied(value) if isinstance(value, Mapping) else value for key, value in settings.items()
    }


def _is_missing(settings: Mapping[str, Any], default: Default) -> bool:
    if default.within and not isinstance(value_at(settings, default.within), Mapping):
        return False
    return not any(_is_given(settings, name) for name in (default.name, *default.unless))


def _is_given(settings: Mapping[str, Any], name: str) -> bool:
    """Tells whether the setting is there, or has no place because its section is something else."""
    section: Any = settings
    for step in name.split("."):
        if not isinstance(section, Mapping):
            return True
        if step not in section:
            return False
        section = section[step]
    return True
