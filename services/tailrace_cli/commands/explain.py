"""`tailrace explain`: one key of an experiment, or all keys of a section."""

from collections.abc import Iterator
from typing import Annotated

import typer

from tailrace.config import SECTIONS, RunConfig
from tailrace.config.settings import Refused, Rule
from tailrace_cli.console import stdout
from tailrace_cli.importing.systems import rules_named
from tailrace_cli.reference import Entry, find, is_key, other_names, rule_named


def explain(
    key: Annotated[
        str, typer.Argument(help="A key, or a section: learner.critic. None: names of all.")
    ] = "",
) -> None:
    """Print a key's meaning, type, default and readers; of a section, all its keys."""
    for line in explanation(key) if key else _names():
        stdout.print(line, soft_wrap=True)


def _names() -> Iterator[str]:
    yield f"sections: {', '.join(SECTIONS)}"
    yield f"keys at the top: {', '.join(sorted(RunConfig.__struct_fields__))}"
    yield "tailrace explain NAME prints one; docs/reference.md has all"


def explanation(name: str) -> Iterator[str]:
    """Yields the lines about a key, about a name of it in other systems, or about a section.

    Raises `ConfigError` with the closest names for an unknown one.
    """
    rule, system = rule_named(name), ""
    if rule is None and not is_key(name):
        rule, system = _foreign_rule(name)
    if rule is not None:
        yield f"{name}{system}: {', '.join(rule.sets) or rule.remark}"
        if rule.remark and not isinstance(rule, Refused):
            yield f"  {rule.remark}"
        names = [key for key in rule.sets if "*" not in key]
    else:
        names = [name]
    for each in names:
        own, *below = _with_itself_first(each, find(each))
        yield from _about(own) if own.name.count(".") == each.count(".") else [_in_short(own)]
        yield from map(_in_short, below)


def _foreign_rule(name: str) -> tuple[Rule | None, str]:
    """Rule of `tailrace import-config` for a setting of another system, and that system in brackets."""
    for system, rule in rules_named(name):
        return rule, f" (of {system.title})"
    return None, ""


def _with_itself_first(name: str, found: list[Entry]) -> list[Entry]:
    return sorted(found, key=lambda entry: entry.name.count(".") != name.count("."))


def _about(entry: Entry) -> Iterator[str]:
    key = entry.key
    yield key.name
    yield f"  {key.meaning}"
    yield f"  type: {key.type.replace('`', '')}"
    yield f"  default: {key.default}"
    if key.unit:
        yield f"  unit: {key.unit}"
    yield f"  read by: {', '.join(entry.readers)}"
    if names := other_names(key.name):
        yield f"  also named: {', '.join(names)}"


def _in_short(entry: Entry) -> str:
    sentence = entry.key.meaning.partition(". ")[0].rstrip(".")
    return f"{entry.name} ({entry.key.default}): {sentence}"
