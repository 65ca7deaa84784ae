"""`tailrace import-config`: another system's configuration as an experiment of ours."""

import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml

from tailrace.config import SECTIONS, ConfigError, InvalidConfigError
from tailrace.config.settings import value_at
from tailrace_cli.exit_codes import USER_ERROR
from tailrace_cli.experiment import decode
from tailrace_cli.importing.convert import Imported, add_always, completed, convert, with_integers
from tailrace_cli.importing.fitting import fitted
from tailrace_cli.importing.rules import Default, System
from tailrace_cli.importing.source import ForeignConfig, read_source
from tailrace_cli.importing.systems import SYSTEMS
from tailrace_cli.validation import check_experiment

_NO_REWARD = "missing: reward.rewards: say what scores the replies to the rows of the data sets"
_MISSING, _NOT_VALID, _NOT_MAPPED = "missing: ", "not valid: ", "not mapped: "
_ABSENT = (
    "` is missing",
    "neither pretrain",
    "not neither",
    "needs values",
    "must be given with",
    "neither in",
)
_FIELD = re.compile(r"(?:([\w.]+): )?the key `(\w+)` is missing")
_ONLY_REFERRED_TO = "other settings refer to it, and have its value"


class Converted(NamedTuple):
    """An experiment, and lines about settings of the source."""

    text: str  # YAML
    left: tuple[str, ...]  # settings that are not mapped, missing or not valid
    differing: tuple[str, ...]  # mapped settings with another meaning here
    notes: tuple[str, ...]  # settings that change no result; defaults not mapped

    @property
    def is_valid(self) -> bool:
        """False if the experiment holds a value that is not possible, or lacks one."""
        return not any(line.startswith((_NOT_VALID, _MISSING)) for line in self.left)

    @property
    def verdict(self) -> str:
        """One line: whether the experiment runs, or what it needs."""
        kinds = (_MISSING, _NOT_VALID, _NOT_MAPPED)
        missing, wrong, lost = (
            [line.removeprefix(kind) for line in self.left if line.startswith(kind)] for kind in kinds
        )
        tail = f"; {len(lost)} settings have no equivalent" if lost else ""
        needed = map(_needed_key, (*wrong, *missing))
        verdict = f"needs: {', '.join(dict.fromkeys(needed))}" if wrong or missing else "runs"
        return verdict + tail

    def remarks(self, *, with_harmless: bool) -> Iterator[str]:
        """Yields lines for a reader; harmless settings are counted, or listed, too."""
        yield from (*self.left, *self.differing)
        if with_harmless:
            yield from self.notes
        elif self.notes:
            yield f"{len(self.notes)} harmless settings and defaults are left out: --all lists them"
        yield self.verdict


def import_config(
    system: Annotated[str, typer.Argument(help="roll, verl or areal.")],
    words: Annotated[
        list[str],
        typer.Argument(
            help="A file (YAML, or a list of key=value), with key=value changes behind it; or, behind "
            "--, the words that a shell passes to the trainer."
        ),
    ],
    output: Annotated[str, typer.Option("-o", "--output", help="Write there, not to stdout.")] = "",
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 2 if anything is left.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of -o.")] = False,
    show_all: Annotated[bool, typer.Option("--all", help="List harmless settings, too.")] = False,
) -> None:
    """Write another system's configuration in our keys; settings without a place go to stderr.

    The last line says whether the experiment runs or what it needs. Exit code 2: it needs something.

    A recipe that is a shell script: put `tailrace import-config SYSTEM --` in place of
    `python3 -m ...` in a copy of the script, and run that copy.
    """
    converted = converted_from(system, words)
    if output:
        write(converted, Path(output), overwrite=overwrite)
    else:
        sys.stdout.write(converted.text)
    for line in converted.remarks(with_harmless=show_all):
        sys.stderr.write(f"{line}\n")
    raise typer.Exit(USER_ERROR if (strict and converted.left) or not converted.is_valid else 0)


def converted_from(system: str, words: Sequence[str]) -> Converted:
    """Returns the experiment, and a line for every setting that it lacks or that is not possible.

    `words` are a file, or the words that a shell passes to the trainer. Raises `ConfigError` for an
    unknown system, and for words without settings.
    """
    if system not in SYSTEMS:
        raise ConfigError(f"unknown system {system!r}: choose one of {', '.join(SYSTEMS)}")
    source = read_source(words)
    complete, defaults = completed(source.settings, SYSTEMS[system].defaults)
    imported = convert(SYSTEMS[system], complete)
    added = add_always(imported, SYSTEMS[system].always)
    imported.content = with_integers(imported.content)
    used, notes = _without_defaults(imported, defaults)
    imported.unmapped.update(source.unread)
    _mark_referred_to(imported, source)
    differing = [
        f"differs: {key}: {text}"
        for key, text in sorted(SYSTEMS[system].differs.items())
        if value_at(source.settings, key) is not None and key not in imported.unmapped
    ]
    differing += [f"differs: {line}" for line in fitted(imported.content)]
    _set_harmless_aside(imported, SYSTEMS[system])
    lines = [f"{_NOT_MAPPED}{key}: {reason}" for key, reason in sorted(imported.unmapped.items())]
    idle = tuple(f"no effect: {key}: {reason}" for key, reason in sorted(imported.idle.items()))
    header = _header(SYSTEMS[system], source, [*used, *added])
    text = yaml.safe_dump(_ordered(imported.content), sort_keys=False, allow_unicode=True)
    left = (*lines, *_not_valid(imported))
    return Converted(header + text, left, tuple(differing), (*idle, *notes))


def _needed_key(problem: str) -> str:
    """Returns the key of which a problem speaks first."""
    if found := _FIELD.match(problem):
        return ".".join(filter(None, found.groups()))
    key = problem.partition(": ")[0].partition(" ")[0]
    return "pretrain" if key in ("give", "neither") else key


def _mark_referred_to(imported: Imported, source: ForeignConfig) -> None:
    for key in imported.unmapped:
        if any(part in source.references for part in _sections(key)):
            imported.unmapped[key] = _ONLY_REFERRED_TO


def _set_harmless_aside(imported: Imported, system: System) -> None:
    """Moves settings without a use from those that are not mapped to those without an effect."""
    harmless = [
        key
        for key, reason in imported.unmapped.items()
        if reason == _ONLY_REFERRED_TO or _is_harmless(key, system)
    ]
    imported.idle.update((key, imported.unmapped.pop(key)) for key in harmless)


def _is_harmless(key: str, system: System) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in system.harmless)


def write(converted: Converted, output: Path, *, overwrite: bool) -> None:
    """Writes the experiment; raises `ConfigError` if that is not possible or not wanted."""
    if output.exists() and not overwrite and not _may_overwrite(output):
        raise ConfigError(f"{output} exists and stays as it is: give --overwrite, or another file")
    try:
        output.write_text(converted.text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {output}: {error.strerror}: give -o a file in a folder that exists"
        ) from error


def _may_overwrite(output: Path) -> bool:
    """Asks at a terminal; without one, the answer is no."""
    is_asked = sys.stdin is not None and sys.stdin.isatty()  # a service may run without any input
    return is_asked and typer.confirm(f"{output} exists: overwrite it?", err=True)


def _without_defaults(
    imported: Imported, defaults: Iterable[Default]
) -> tuple[list[str], tuple[str, ...]]:
    """Removes defaults from the settings that the file lacks.

    Returns the names of mapped defaults, and lines for those that are not mapped.
    """
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
    """Yields the key and the sections that contain it."""
    while key:
        yield key
        key = key.rpartition(".")[0]


def _header(system: System, source: ForeignConfig, defaults: list[str]) -> str:
    lines = [f"From a configuration of {system.title}: {source.name}"]
    if defaults:
        names = ", ".join(defaults)
        lines += textwrap.wrap(
            f"From its defaults, which differ from ours: {names}",
            96,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return "".join(f"# {line}\n" for line in lines)


def _not_valid(imported: Imported) -> list[str]:
    """Lists what is missing and not valid: no reward for data sets, and problems of the sections."""
    lines = []
    problems = _problems(imported.content)
    if value_at(imported.content, "agents.datasets") and "reward" not in imported.content:
        lines.append(_NO_REWARD)
        problems = [
            problem for problem in problems if not problem.startswith("reward.rewards: nothing")
        ]
    return lines + [f"{_kind(problem)}: {problem}" for problem in problems]


def _problems(content: dict[str, Any]) -> Sequence[str]:
    """Returns the problems of all sections, or else the first one of all together."""
    try:
        check_experiment(decode(content, "the experiment"))
    except InvalidConfigError as error:
        return error.problems
    except ConfigError as error:
        return [str(error)]
    return []


def _kind(problem: str) -> str:
    return "missing" if any(words in problem for words in _ABSENT) else "not valid"


def _ordered(content: dict[str, Any]) -> dict[str, Any]:
    """Puts the keys of the run before the sections."""
    top = {key: value for key, value in content.items() if key not in SECTIONS}
    return top | {key: content[key] for key in SECTIONS if key in content}
