"""Vocabulary of the tables for other systems, on top of the rules of `tailrace.config.settings`."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tailrace.config.settings import (
    Derived,
    Lookup,
    NoEffectError,
    Renamed,
    Rule,
    RuleTable,
    same,
)
from tailrace.config.settings.values import whole_number

Condition = Callable[[Lookup], bool]

# Values of ours for what several systems always do.
NOT_CORRECTED: dict[str, Any] = {"learner.behaviour_correction": "none"}
SYNCHRONOUS: dict[str, Any] = {"max_staleness": 0}


class Default(NamedTuple):
    """Value of a setting that a file does not give."""

    name: str
    value: Any
    unless: tuple[str, ...] = ()  # settings that replace this one, whatever their value
    within: str = ""  # section without which the setting has no meaning


@dataclass(frozen=True)
class System:
    """Another system, with rules for the settings that we know of it.

    `defaults` are values of that system for settings that a file lacks; rules apply to them too.
    `always` are values of our keys for behaviour that the system always has, or has unless a setting
    that is null by default changes it. Our own defaults remain for where results are kept, which
    trackers record them, and how many devices compute them.
    """

    name: str
    title: str
    rules: tuple[Rule, ...]
    defaults: tuple[Default, ...]
    always: Mapping[str, Any]
    harmless: tuple[str, ...] = ()  # patterns of settings that are not mapped, and change no result
    differs: Mapping[str, str] = field(default_factory=dict)  # other meanings of mapped settings

    @property
    def table(self) -> RuleTable:
        """Returns the rules as an open table: other names have no equivalent."""
        return RuleTable(self.rules, closed=False)


def to(name: str, *keys: str, by: Callable[[Any], Any] = same, remark: str = "") -> Renamed:
    """`name` sets `keys` to its value, or to the result of `by`."""
    return Renamed(name, keys, by, remark)


def read_with(name: str, other: str) -> Derived:
    """The rule of the setting `other` reads `name` too."""
    return Derived(name, (), lambda _value, _lookup: {}, f"with `{other}`")


def where(holds: Condition, otherwise: str, *rules: Rule) -> Iterable[Derived]:
    """`rules` for configurations where `holds`; elsewhere without effect, because of `otherwise`."""

    def guarded(rule: Rule) -> Derived:
        def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
            if not holds(lookup):
                raise NoEffectError(otherwise)
            return rule.values(value, lookup)

        remark = f"{rule.remark}; " if rule.remark else ""
        return Derived(rule.name, rule.sets, derive, f"{remark}not where {otherwise}")

    return tuple(map(guarded, rules))


def is_on(name: str) -> Condition:
    """Holds if the setting `name` is given and not false, 0 or empty."""
    return lambda lookup: bool(lookup(name))


def decays(*schedules: str) -> Condition:
    """Holds if the first given of these settings names a schedule of a rate that falls."""
    return lambda lookup: (
        next((str(name) for each in schedules if (name := lookup(each)) is not None), "constant")
        != "constant"
    )


def is_gae(name: str) -> Condition:
    """Holds if the setting `name` chooses the estimator with a critic."""
    return lambda lookup: str(lookup(name)) == "gae"


def repeats(name: str, other: str, reason: str, default: Any = None) -> Derived:
    """`name` must have the value of `other`, or `default` if `other` is not given."""

    def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        wanted = lookup(other, value if default is None else default)
        if value != wanted:
            raise ValueError(f"differs from {other} ({wanted!r}): {reason}")
        return {}

    return Derived(name, (), derive, f"as `{other}`")


def ratio_of_steps(name: str, key: str, steps: str) -> Derived:
    """`name` is a share of the number of steps in the setting `steps`; `key` is the product."""

    def derive(value: Any, lookup: Lookup) -> Mapping[str, Any]:
        if not value:
            return {}
        try:
            total = whole_number(lookup(steps))
        except ValueError as error:
            raise ValueError(f"a share of all steps, but {steps} gives no number of steps") from error
        if not 0 <= value <= 1:
            raise ValueError(f"expected a share of all steps, from 0 to 1, found {value!r}")
        return {key: round(value * total)}

    return Derived(name, (key,), derive, f"a share of `{steps}`")


def data_files(
    name: str,
    tag: str,
    key: str,
    remark: str,
    files_of: Callable[[Any, Lookup], list[str]] = lambda paths, _lookup: listed(paths),
) -> Derived:
    """`name` gives files or hub names of data sets, which are called `tag` or `tag_<n>` here.

    `key` lists the names of the data sets.
    """

    def derive(paths: Any, lookup: Lookup) -> Mapping[str, Any]:
        files = files_of(paths, lookup)
        names = [tag] if len(files) == 1 else [f"{tag}_{index}" for index in range(len(files))]
        entries = {
            f"agents.datasets.{each}.path": file for each, file in zip(names, files, strict=True)
        }
        return {**entries, key: names}

    return Derived(name, (f"agents.datasets.{tag}.path", key), derive, remark)


def listed(texts: Any) -> list[str]:
    """One text, or a list of texts, as a list; `ValueError` for anything else."""
    found = [texts] if isinstance(texts, str) else texts
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError(f"expected a text or a list of texts, found {texts!r}")
    return list(found)


def negated(value: Any) -> bool:
    """The opposite of a switch."""
    return not value


def run_name(value: Any) -> str:
    """`value` without characters that the name of a run cannot have, and no longer than one."""
    kept = "".join(char if char.isalnum() or char in "-_" else "_" for char in str(value))
    return kept.strip("_-")[:64].rstrip("_-") or "imported"
