"""What a table of another system's settings is made of.

The lines are those of our own settings (`tailrace.config.settings`), named as that system names them.
A `*` in a name stands for any one key, and in the keys that are set for what it stood for, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tailrace.config.settings import Derived, Renamed, Setting
from tailrace.config.settings.setting import Lookup, same


class Default(NamedTuple):
    """A setting's value where the file does not say it."""

    name: str
    value: Any
    unless: tuple[str, ...] = ()  # settings that say it too, whatever their value
    within: str = ""  # a section without which the setting has no meaning


@dataclass(frozen=True)
class System:
    """Another system: what it is called, and its settings as far as we know them.

    `defaults` are settings of that system, read like those of a file. `always` are keys of ours for
    what it always does, or does unless told by a setting that is null by default. Where results are
    kept, what tracks them and on how many devices they are computed stay ours.
    """

    name: str
    title: str
    settings: tuple[Setting, ...]
    defaults: tuple[Default, ...]
    always: Mapping[str, Any]


def to(name: str, *keys: str, by: Callable[[Any], Any] = same, remark: str = "") -> Renamed:
    """`name` sets `keys` to its value, or to what `by` makes of it."""
    return Renamed(name, keys, by, remark)


class NoEffectError(ValueError):
    """A setting that changes nothing in its own system either, beside the others there; and why."""


def when(
    name: str,
    key: str,
    holds: Callable[[Lookup], bool],
    otherwise: str,
    by: Callable[[Any], Any] = same,
) -> Setting:
    """`name` sets `key` where `holds`; `otherwise` says why it changes nothing elsewhere."""

    def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        if not holds(lookup):
            raise NoEffectError(otherwise)
        return {key: by(value)}

    return Derived(name, (key,), derive, f"not where {otherwise}")


def only(holds: Callable[[Lookup], bool], otherwise: str, setting: Renamed | Derived) -> Setting:
    """`setting` where `holds`; `otherwise` says why it changes nothing elsewhere."""

    def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        if not holds(lookup):
            raise NoEffectError(otherwise)
        if isinstance(setting, Renamed):
            return dict.fromkeys(setting.sets, setting.convert(value))
        return setting.derive(value, lookup)

    remark = f"{setting.remark}; " if setting.remark else ""
    return Derived(setting.name, setting.sets, derive, f"{remark}not where {otherwise}")


def beside(name: str, holds: Callable[[Lookup], bool], otherwise: str, remark: str) -> Setting:
    """For a setting that another one reads where `holds`."""
    return only(holds, otherwise, Derived(name, (), nothing, remark))


def repeats(name: str, other: str, reason: str, default: Any = None) -> Derived:
    """`name` says again what `other` says (`default` where that is not given), or is not possible."""

    def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        wanted = lookup(other, value if default is None else default)
        if value != wanted:
            raise ValueError(f"differs from {other} ({wanted!r}): {reason}")
        return {}

    return Derived(name, (), derive, f"as `{other}`")


def ratio_of_steps(name: str, key: str, steps: str) -> Derived:
    """`name` is a share of the steps that `steps` gives; `key` is their number."""

    def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        total = lookup(steps)
        if not value:
            return {}
        is_whole = isinstance(total, int) or (isinstance(total, float) and total.is_integer())
        if not is_whole or total < 1:
            raise ValueError(f"a share of all steps, and {steps} does not say how many there are")
        return {key: round(value * total)}

    return Derived(name, (key,), derive, f"a share of `{steps}`")


def nothing(_value: Any, _lookup: Lookup) -> Mapping[str, Any]:
    """For a setting that another one reads."""
    return {}


def not_(value: Any) -> bool:
    """The opposite."""
    return not value


def run_name(value: Any) -> str:
    """A name that a run may have."""
    kept = "".join(char if char.isalnum() or char in "-_" else "_" for char in str(value))
    return kept.strip("_-") or "imported"
