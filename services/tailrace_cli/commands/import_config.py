"""`tailrace import-config`: another system's configuration as an experiment of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tailrace.config import SECTIONS, ConfigError
from tailrace_cli.experiment import decode
from tailrace_cli.importing.areal import AREAL
from tailrace_cli.importing.convert import ONLY_REFERRED_TO, Imported, at, convert
from tailrace_cli.importing.roll import ROLL
from tailrace_cli.importing.rules import System
from tailrace_cli.importing.source import read_source, references
from tailrace_cli.importing.verl import VERL
from tailrace_cli.validation import check_experiment

SYSTEMS: dict[str, System] = {system.name: system for system in (ROLL, VERL, AREAL)}


class Converted(NamedTuple):
    """An experiment and what is to be said of it, a line each."""

    text: str  # YAML
    left: tuple[str, ...]  # what is not mapped, or missing
    idle: tuple[str, ...]  # what changes nothing in its own system either


def import_config(system: str, path: Path) -> Converted:
    """The experiment, and a line for every setting that it lacks or that is not possible.

    Raises `ConfigError` for a system that is not known and a file that cannot be read.
    """
    if system not in SYSTEMS:
        raise ConfigError(f"unknown system {system!r}: choose one of {', '.join(SYSTEMS)}")
    settings, unread = read_source(path)
    imported = convert(SYSTEMS[system], settings)
    imported.unmapped.update(unread)
    for key in imported.unmapped.keys() & references(path):
        imported.unmapped[key] = ONLY_REFERRED_TO
    lines = [f"not mapped: {key}: {reason}" for key, reason in sorted(imported.unmapped.items())]
    missing = [f"missing: {line}" for line in _missing(imported)]
    text = yaml.safe_dump(_ordered(imported.content), sort_keys=False, allow_unicode=True)
    header = f"# From a configuration of {SYSTEMS[system].title}: {path.name}\n"
    idle = tuple(f"no effect: {key}: {reason}" for key, reason in sorted(imported.idle.items()))
    return Converted(header + text, (*lines, *missing), idle)


def _missing(imported: Imported) -> list[str]:
    """What scores data sets, if nothing does, and the first thing that is not valid."""
    missing = []
    if at(imported.content, "agents.datasets") and "reward" not in imported.content:
        missing.append("reward.rewards: say what scores the replies to the rows of the data sets")
    try:
        check_experiment(decode(imported.content, "the experiment"))
    except ConfigError as error:
        missing.append(str(error))
    return missing


def _ordered(content: dict[str, Any]) -> dict[str, Any]:
    """The run's own keys before the sections."""
    top = {key: value for key, value in content.items() if key not in SECTIONS}
    return top | {key: content[key] for key in SECTIONS if key in content}
