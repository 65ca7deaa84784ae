"""Rules of a table: each turns one setting of a configuration into keys of ours.

A `*` in the name of a rule stands for any one key; in the keys that the rule sets, it stands for the
same keys, in order.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from tailrace.config.suggestions import not_one_of


class Lookup(Protocol):
    """Reads a key of the experiment so far, else a setting of the source; `default` without both."""

    def __call__(self, key: str, default: Any = None) -> Any:
        """Returns the value at the dotted `key`."""


Conversion = Callable[[Any], Any]
Derivation = Callable[[Any, Lookup], Mapping[str, Any]]


class NoEffectError(ValueError):
    """A setting changes nothing in its own system either; the message gives the reason."""


def same(value: Any) -> Any:
    """Returns the value unchanged."""
    return value


@dataclass(frozen=True)
class Renamed:
    """`name` sets every key of `sets` to the value that `convert` returns.

    `convert` raises `ValueError` with the remedy for a value that has no meaning here.
    """

    phase: ClassVar[int] = 1

    name: str  # dotted, as users write it
    sets: tuple[str, ...]  # dotted keys that services read
    convert: Conversion = same
    remark: str = ""  # note in the reference, where the names do not explain enough

    def values(self, value: Any, _lookup: Lookup) -> Mapping[str, Any]:
        """Returns the values of our keys."""
        return dict.fromkeys(self.sets, self.convert(value))


@dataclass(frozen=True)
class Derived:
    """`name` sets keys to values that depend on further settings.

    `derive(value, lookup)` returns values by key, all among `sets`. It raises `ValueError` with the
    remedy, or `NoEffectError`. It sees the results of `Renamed` rules and of earlier `Derived` rules.
    """

    phase: ClassVar[int] = 2

    name: str
    sets: tuple[str, ...]
    derive: Derivation
    remark: str

    def values(self, value: Any, lookup: Lookup) -> Mapping[str, Any]:
        """Returns the values of our keys."""
        return self.derive(value, lookup)


@dataclass(frozen=True)
class Refused:
    """`name` has no meaning here; only the values `harmless` are accepted, since they change nothing.

    For a section, `remedy` is also the reason of every key below it that no rule knows.
    """

    phase: ClassVar[int] = 0
    sets: ClassVar[tuple[str, ...]] = ()

    name: str
    remedy: str
    harmless: tuple[Any, ...] = ()

    @property
    def remark(self) -> str:
        """Note in the reference."""
        allowed = ", ".join(map(_shown, self.harmless))
        return f"only {allowed}: {self.remedy}" if allowed else f"refused: {self.remedy}"

    def values(self, value: Any, _lookup: Lookup) -> Mapping[str, Any]:
        """Returns nothing for a harmless value; raises `ValueError` with the remedy for others."""
        if not any(value == harmless for harmless in self.harmless):
            raise ValueError(f"{value!r} has no meaning here: {self.remedy}")
        return {}


def _shown(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


Rule = Renamed | Derived | Refused


class ValueNames:
    """Conversion from the names of values in other systems to our values."""

    def __init__(self, ours: Mapping[str, Any]) -> None:
        self.ours = dict(ours)

    def __call__(self, value: Any) -> Any:
        """Returns our value; raises `ValueError` with all known names."""
        if not isinstance(value, Hashable) or value not in self.ours:
            raise ValueError(not_one_of(repr(value), map(str, self.ours)))
        return self.ours[value]


def value_names(*same: str, **ours: Any) -> ValueNames:
    """Conversion for values that have the `same` name here, and for `ours` by their other names."""
    return ValueNames({**{name: name for name in same}, **ours})
