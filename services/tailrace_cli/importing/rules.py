"""What a table of another system's settings is made of.

The lines are those of our own settings (`tailrace.config.settings`), named as that system names them.
A `*` in a name stands for any one key, and in the keys that are set for what it stood for, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tailrace.config.settings import Derived, Renamed, Setting
from tailrace.config.settings.setting import Lookup, same


@dataclass(frozen=True)
class System:
    """Another system: what it is called, and its settings as far as we know them."""

    name: str
    title: str
    settings: tuple[Setting, ...]


def to(name: str, *keys: str, by: Callable[[Any], Any] = same, remark: str = "") -> Setting:
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


def ratio_of_steps(name: str, key: str, steps: str) -> Setting:
    """`name` is a share of the steps that `steps` gives; `key` is their number."""

    def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        total = lookup(steps)
        if not value:
            return {}
        if not isinstance(total, int) or total < 1:
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
