"""Applies a table of rules to a configuration, ours by other names or another system's (pure).

Invariants: every setting of the source is in the result or among `unknown`, `problems` and `idle`,
except null, which counts as not given; no problem hides another; the source stays as it is.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tailrace.config.settings.rules import Lookup, NoEffectError, Refused, Rule
from tailrace.config.suggestions import did_you_mean

NO_EQUIVALENT = "has no equivalent"
Check = Callable[[str, Any, Lookup], None]


class Problem(NamedTuple):
    """A setting that the experiment cannot have."""

    value: Any
    reason: str


class RuleMatch(NamedTuple):
    """A rule that a name fits."""

    place: int  # in the table
    rule: Rule
    stars: tuple[str, ...]  # the keys that `*` stands for


class RuleTable:
    """Rules, found by name. In a `closed` table, only names that it knows are possible.

    Of several rules for one name the first counts, and rules without `*` come before rules with one.
    """

    def __init__(self, rules: Iterable[Rule], *, closed: bool) -> None:
        self.rules = tuple(rules)
        self.closed = closed
        self._plain: dict[str, RuleMatch] = {}
        self._patterns: list[tuple[list[str], int, Rule]] = []
        self._keys_below: dict[str, set[str]] = {}
        for place, rule in enumerate(self.rules):
            if "*" in rule.name:
                self._patterns.append((rule.name.split("."), place, rule))
            else:
                self._plain.setdefault(rule.name, RuleMatch(place, rule, ()))
                self._add_sections(rule.name)

    def match(self, name: str) -> RuleMatch | None:
        """Returns the rule for `name`."""
        if name in self._plain:
            return self._plain[name]
        steps = name.split(".")
        for pattern, place, rule in self._patterns:
            pairs = list(zip(pattern, steps, strict=False))
            if len(pattern) == len(steps) and all(wanted in ("*", step) for wanted, step in pairs):
                return RuleMatch(place, rule, tuple(step for wanted, step in pairs if wanted == "*"))
        return None

    def keys_below(self, section: str) -> list[str]:
        """Returns the keys that rules without `*` know directly below `section`, sorted."""
        return sorted(self._keys_below.get(section, ()))

    def why_unknown(self, name: str) -> str:
        """Returns the reason for a name without a rule: of its section, or the closest name."""
        parent, _, key = name.rpartition(".")
        section = parent
        while section:
            matched = self.match(section)
            if matched is not None and isinstance(matched.rule, Refused):
                return matched.rule.remedy
            section = section.rpartition(".")[0]
        return did_you_mean(key, self.keys_below(parent)) if self.closed else NO_EQUIVALENT

    def _add_sections(self, name: str) -> None:
        parent, dot, key = name.rpartition(".")
        self._keys_below.setdefault(parent, set()).add(key)
        if dot:
            self._add_sections(parent)


@dataclass
class Applied:
    """An experiment as services read it, and the settings of the source that it lacks, by name.

    `idle` settings change nothing in their own system either; the value is the reason.
    """

    content: dict[str, Any] = field(default_factory=dict)
    set_by: dict[str, str] = field(default_factory=dict)  # by our key: the setting that gave it
    unknown: dict[str, str] = field(default_factory=dict)  # reasons
    problems: dict[str, Problem] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)

    def as_given(self, message: str) -> str:
        """Adds to `message` the names that the user gave to the keys in it."""
        found = {name: None for key, name in self.set_by.items() if _names_key(message, key)}
        return f"{message} (given as {', '.join(found)})" if found else message


def _names_key(message: str, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}\b", message) is not None


def apply(
    table: RuleTable,
    source: Mapping[str, Any],
    *,
    onto: dict[str, Any] | None = None,
    check: Check | None = None,
) -> Applied:
    """Applies every rule that a setting of `source` fits, to the experiment `onto`.

    `check(key, value, lookup)` raises `ValueError` for a value that our key cannot have. All `Refused`
    rules come first, then all `Renamed`, then all `Derived`, each in the order of the table.
    """
    result = _Result(table, source, Applied(content={} if onto is None else onto), check)
    found = [each for key, value in source.items() for each in result.matches(str(key), value)]
    found.sort(key=lambda each: (each[0].rule.phase, each[0].place))
    for matched, name, value in found:
        result.apply(matched, name, value)
    return result.applied


class _Result:
    """The experiment while rules are applied."""

    def __init__(
        self, table: RuleTable, source: Mapping[str, Any], applied: Applied, check: Check | None
    ) -> None:
        self._table = table
        self._source = source
        self._check = check
        self.applied = applied

    def matches(self, name: str, value: Any) -> Iterator[tuple[RuleMatch, str, Any]]:
        """Yields the settings at and below `name` with their rules; notes those without a rule."""
        if value is None:
            return
        matched = self._table.match(name)
        below = self._table.keys_below(name)
        takes_keys = self._table.closed and below
        if isinstance(value, Mapping) and self._is_section(matched, below, value):
            for key, inner in value.items():
                yield from self.matches(f"{name}.{key}", inner)
        elif matched is not None and not (takes_keys and value):
            yield matched, name, value
        elif takes_keys:
            expected = f"expected keys ({', '.join(below)}), found {value!r}"
            self.applied.problems[name] = Problem(value, expected)
        else:
            self.applied.unknown[name] = self._table.why_unknown(name)

    def _is_section(
        self, matched: RuleMatch | None, below: list[str], section: Mapping[str, Any]
    ) -> bool:
        """Tells whether the keys of a mapping are settings one by one; a refused section is one too."""
        closed = self._table.closed
        if matched is None:
            return bool(below) or not closed
        if below and section:
            return True
        return isinstance(matched.rule, Refused) and not (closed and not section)

    def lookup(self, key: str, default: Any = None) -> Any:
        """Implements `Lookup`."""
        for content in (self.applied.content, self._source):
            if (value := value_at(content, key)) is not None:
                return value
        return default

    def apply(self, matched: RuleMatch, name: str, value: Any) -> None:
        """Sets the keys of the rule, or notes why that is not possible."""

        def lookup(key: str, default: Any = None) -> Any:
            return self.lookup(_filled(key, matched.stars), default)

        try:
            for key, new in matched.rule.values(value, lookup).items():
                self._set(_filled(key, matched.stars), new, name)
        except NoEffectError as error:
            self.applied.idle[name] = str(error)
        except (ValueError, TypeError, ArithmeticError) as error:  # of another type, or infinite
            self.applied.problems[name] = Problem(value, str(error))

    def _set(self, key: str, value: Any, name: str) -> None:
        if self._check is not None:
            self._check(key, value, self.lookup)
        other = value_at(self.applied.content, key)
        if other is None:
            set_at(self.applied.content, key, value)
            self.applied.set_by[key] = name
        elif self._table.closed:
            given = self.applied.set_by.get(key, key)
            raise ValueError(f"{given} is also given and means the same: keep one of them")
        elif value not in (other, {}):
            raise ValueError(f"{key} is {other!r} by another setting")


def value_at(content: Mapping[str, Any], key: str) -> Any:
    """Returns the value at a dotted key; None if there is none."""
    value: Any = content
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def set_at(content: dict[str, Any], key: str, value: Any) -> None:
    """Sets the value at a dotted key; `ValueError` where a section on the way holds a value."""
    *parents, last = key.split(".")
    place = content
    for step in parents:
        inner = place.get(step)
        if inner is None:
            inner = place[step] = {}
        if not isinstance(inner, dict):
            raise ValueError(f"{step} holds {inner!r} instead of keys")
        place = inner
    place[last] = value


def _filled(key: str, stars: tuple[str, ...]) -> str:
    for star in stars:
        key = key.replace("*", star, 1)
    return key
