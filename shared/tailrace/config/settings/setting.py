"""What a line of the table says: renamed, derived from several settings, or refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from tailrace.config.suggestions import not_one_of


class Lookup(Protocol):
    """Reads a setting by our dotted key, as the experiment gives it; `default` where it does not."""

    def __call__(self, key: str, default: Any = None) -> Any:
        """The value at `key`."""


def same(value: Any) -> Any:
    """The value as it is given."""
    return value


@dataclass(frozen=True)
class Renamed:
    """`name` sets every key of `sets` to what `convert` makes of its value.

    `convert` raises `ValueError` with the remedy for a value that has no meaning here.
    """

    name: str  # dotted, as it is written
    sets: tuple[str, ...]  # dotted keys that services read
    convert: Callable[[Any], Any] = same
    remark: str = ""  # for the page of settings, where the names alone do not say it


@dataclass(frozen=True)
class Derived:
    """`name` sets keys to values that depend on further settings, which are read by our keys.

    `derive(value, lookup)` returns them by key, all among `sets`; it raises `ValueError` with the
    remedy. It sees what `Renamed` lines and the `Derived` ones before it have set.
    """

    name: str
    sets: tuple[str, ...]
    derive: Callable[[Any, Lookup], Mapping[str, Any]]
    remark: str


@dataclass(frozen=True)
class Refused:
    """`name` has no meaning here, unless its value is the one that changes nothing."""

    name: str
    remedy: str
    harmless: tuple[Any, ...] = ()
    sets: tuple[str, ...] = ()

    @property
    def remark(self) -> str:
        """For the page of settings."""
        allowed = ", ".join(map(_shown, self.harmless))
        return f"only {allowed}: {self.remedy}" if allowed else f"refused: {self.remedy}"


def _shown(value: Any) -> str:
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


Setting = Renamed | Derived | Refused


class Choice:
    """A conversion between names of values; raises `ValueError` that lists those that there are."""

    def __init__(self, ours: Mapping[str, Any]) -> None:
        self.ours = dict(ours)

    def __call__(self, value: Any) -> Any:
        """Our value for a name."""
        if value not in self.ours:
            raise ValueError(not_one_of(repr(value), map(str, self.ours)))
        return self.ours[value]


def choice(*same: str, **ours: Any) -> Choice:
    """Values that are called the same here, and our values by name."""
    return Choice({**{name: name for name in same}, **ours})
