"""`tailrace import-config`: another system's configuration as an experiment of ours."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tailrace.config import SECTIONS, ConfigError
from tailrace_cli.experiment import decode
from tailrace_cli.importing.areal.settings import AREAL
from tailrace_cli.importing.convert import ONLY_REFERRED_TO, Imported, at, convert
from tailrace_cli.importing.defaults import add_always, completed
from tailrace_cli.importing.reading.source import read_source, references
from tailrace_cli.importing.roll.settings import ROLL
from tailrace_cli.importing.rules import Default, System
from tailrace_cli.importing.verl.settings import VERL
from tailrace_cli.importing.whole_numbers import with_whole_numbers
from tailrace_cli.validation import check_experiment

SYSTEMS: dict[str, System] = {system.name: system for system in (ROLL, VERL, AREAL)}
_NO_REWARD = "missing: reward.rewards: say what scores the replies to the rows of the data sets"
_ABSENT = (
    "missing required field",
    "neither pretrain",
    "needs values",
    "must be given with",
    "neither in",
)

_VALID: dict[str, Any] = {"exp_name": "any", "scheduler": {"tags": ["any"]}}  # what must be there


class Converted(NamedTuple):
    """An experiment and what is to be said of it, a line each."""

    text: str  # YAML
    left: tuple[str, ...]  # what is not mapped, missing or not valid
    notes: tuple[str, ...]  # what changes nothing in its own system either; defaults not mapped


def import_config(system: str, path: Path) -> Converted:
    """The experiment, and a line for every setting that it lacks or that is not possible.

    Raises `ConfigError` for a system that is not known and a file that cannot be read.
    """
    if system not in SYSTEMS:
        raise ConfigError(f"unknown system {system!r}: choose one of {', '.join(SYSTEMS)}")
    settings, unread = read_source(path)
    complete, defaults = completed(settings, SYSTEMS[system].defaults)
    imported = convert(SYSTEMS[system], complete)
    added = add_always(imported, SYSTEMS[system].always)
    imported.content = with_whole_numbers(imported.content)
    used, notes = _without_defaults(imported, defaults)
    imported.unmapped.update(unread)
    referred = references(path)
    for key in imported.unmapped:
        if any(part in referred for part in _sections(key)):
            imported.unmapped[key] = ONLY_REFERRED_TO
    lines = [f"not mapped: {key}: {reason}" for key, reason in sorted(imported.unmapped.items())]
    idle = tuple(f"no effect: {key}: {reason}" for key, reason in sorted(imported.idle.items()))
    header = _header(SYSTEMS[system], path, [*used, *added])
    text = yaml.safe_dump(_ordered(imported.content), sort_keys=False, allow_unicode=True)
    return Converted(header + text, (*lines, *_not_valid(imported)), (*idle, *notes))


def write(converted: Converted, output: Path) -> None:
    """Write the experiment; raises `ConfigError` where that is not possible."""
    try:
        output.write_text(converted.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {output}: {error.strerror}: give -o a file in a folder that exists"
        ) from error


def _without_defaults(
    imported: Imported, defaults: Iterable[Default]
) -> tuple[list[str], tuple[str, ...]]:
    """Take defaults out of what the file lacks: those that are mapped; lines for those that are not."""
    used, notes = [], []
    for default in defaults:
        idle = imported.idle.pop(default.name, None)
        reason = imported.unmapped.pop(default.name, None)
        if reason is not None:
            notes.append(f"default: {default.name}: {reason}")
        elif idle is None:
            used.append(default.name)
    return used, tuple(notes)


def _sections(key: str) -> Iterator[str]:
    """The key and the sections that it lies in."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _header(system: System, path: Path, defaults: list[str]) -> str:
    lines = [f"From a configuration of {system.title}: {path.name}"]
    if defaults:
        names = ", ".join(defaults)
        lines += textwrap.wrap(
            f"By its defaults, which are not ours: {names}",
            96,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "".join(f"# {line}\n" for line in lines)


def _not_valid(imported: Imported) -> list[str]:
    """What scores data sets, if nothing does, and what of each section is not valid."""
    lines = []
    if at(imported.content, "agents.datasets") and "reward" not in imported.content:
        lines.append(_NO_REWARD)
    problems = list(dict.fromkeys(_problems(imported.content)))
    return lines + [f"{_kind(problem)}: {problem}" for problem in problems]


def _problems(content: dict[str, Any]) -> Iterator[str]:
    """The first of every section by itself, or else of all together."""
    run = {key: value for key, value in content.items() if key not in SECTIONS}
    parts = [{**run, "scheduler": _VALID["scheduler"]}]
    parts += [_VALID | {key: content.get(key, {})} for key in SECTIONS]
    problems = [problem for part in parts if (problem := _problem(part, False)) is not None]
    if not problems and (problem := _problem(content, True)) is not None:
        problems.append(problem)
    yield from problems


def _problem(content: dict[str, Any], is_whole: bool) -> str | None:
    try:
        experiment = decode(content, "the experiment")
        if is_whole:
            check_experiment(experiment)
    except ConfigError as error:
        return str(error)
    return None


def _kind(problem: str) -> str:
    return "missing" if any(words in problem for words in _ABSENT) else "not valid"


def _ordered(content: dict[str, Any]) -> dict[str, Any]:
    """The run's own keys before the sections."""
    top = {key: value for key, value in content.items() if key not in SECTIONS}
    return top | {key: content[key] for key in SECTIONS if key in content}
