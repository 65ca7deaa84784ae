"""What another system does where its configuration says nothing: settings of its own, and keys of ours.

Both are applied below what the file says. Invariant: a setting of the file, null too, is left alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tailrace_cli.importing.convert import Imported, at
from tailrace_cli.importing.rules import Default

# What several systems always do.
NOT_CORRECTED: dict[str, Any] = {"learner.behaviour_correction": "none"}
SYNCHRONOUS: dict[str, Any] = {"max_staleness": 0}


def completed(
    settings: Mapping[str, Any], defaults: Iterable[Default]
) -> tuple[dict[str, Any], tuple[Default, ...]]:
    """The settings with the defaults of those that are missing, and which these are.

    A setting that is null is not missing.
    """
    complete = _copied(settings)
    added = tuple(default for default in defaults if _is_missing(settings, default))
    for default in added:
        *parents, last = default.name.split(".")
        place = complete
        for step in parents:
            place = place.setdefault(step, {})
        place[last] = default.value
    return complete, added


def add_always(imported: Imported, always: Mapping[str, Any]) -> tuple[str, ...]:
    """Set keys that nothing has set, and say which; those of a critic only if there is one."""
    added = []
    for key, value in always.items():
        *parents, last = key.split(".")
        is_part = parents[:2] == ["learner", "critic"]
        has_place = not is_part or at(imported.content, "learner.critic") is not None
        if has_place and at(imported.content, key) is None:
            place = imported.content
            for step in parents:
                place = place.setdefault(step, {})
            place[last] = value
            added.append(key)
    return tuple(added)


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copied(value) if isinstance(value, Mapping) else value for key, value in settings.items()
    }


def _is_missing(settings: Mapping[str, Any], default: Default) -> bool:
    if default.within and not isinstance(at(settings, default.within), Mapping):
        return False
    return not any(_says(settings, name) for name in (default.name, *default.unless))


def _says(settings: Mapping[str, Any], name: str) -> bool:
    """Whether the setting is there, or has no place because its section is something else."""
    section: Any = settings
    for step in name.split("."):
        if not isinstance(section, Mapping):
            return True
        if step not in section:
            return False
        section = section[step]
    return True
