"""Overrides by a trainer's command line (`key=value`), as the settings that they make.

Values are read by Hydra's own grammar, as the trainers read them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tailrace.config import ConfigError
from tailrace_cli.importing.reading.shell import Word, commands

COMPOSITION = "composition by Hydra: give the composed configuration instead"
_SHAPE = re.compile(r"(?:\+{0,2}[A-Za-z_][\w./@-]*=.*|~[A-Za-z_][\w./@-]*(?:=.*)?)", re.DOTALL)
_HOME = "TAILRACE_HOME"  # stands for ~, which Hydra's grammar has not
_LAUNCHERS = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed")
_FILE_OPTION = re.compile(r"(--config(?:[-_](?:path|name|dir))?|-cn|-cp|-cd)(?:=(.*))?", re.DOTALL)

Settings = tuple[DictConfig, dict[str, str]]  # settings, and what could not be read, with the reason


def in_text(text: str, source: str) -> Settings | None:
    """Of lines `key=value`, or of a script that calls a trainer; None: there are neither.

    Raises `ConfigError` for a script that calls more than one trainer with overrides.
    """
    lines = commands(text)
    calls = [call for line in lines if any(map(_is_override, call := _arguments(line)))]
    if len(calls) > 1:
        raise ConfigError(
            f"{source} calls a trainer with overrides {len(calls)} times: leave one call in the file"
        )
    if calls:
        settings, unread = _read(calls[0])
        return settings, unread | _outside(lines)
    words = [word for line in lines for word in line]
    return _read(words) if words and all(map(_is_override, words)) else None


def in_list(items: Iterable[Any]) -> Settings | None:
    """Of a list of texts `key=value`; None: it holds other things."""
    words = [_item(item) for item in items]
    return _read(words) if words and all(map(_is_override, words)) else None


def _outside(lines: list[list[Word]]) -> dict[str, str]:
    """Overrides that begin a line of their own: a comment or a space behind `\\` ended the call."""
    words = [word for line in lines if _is_override(line[0]) for word in line]
    lost = [word for word in words if _is_override(word) and "." in _key(word)]
    return {_key(word): "stands outside of the call, whose lines end above it" for word in lost}


def _item(item: Any) -> Word:
    """A text that was copied from a command line has its quotes still."""
    lines = commands(str(item))
    return lines[0][0] if len(lines) == 1 and len(lines[0]) == 1 else Word(str(item))


def _is_override(word: Word) -> bool:
    return _SHAPE.fullmatch(word.text) is not None


def _arguments(line: list[Word]) -> list[Word]:
    """What a trainer gets; nothing for commands that start no Python."""
    for index, word in enumerate(line):
        if _LAUNCHERS.fullmatch(PurePath(word.text).name):
            return line[index + 1 :]
    return []


def _read(words: list[Word]) -> Settings:
    settings, unread = OmegaConf.create({}), dict[str, str]()
    parser = OverridesParser.create()
    for index, word in enumerate(words):
        if not _is_override(word):
            unread.update(_no_override(words, index))
        elif word.unknown:
            unread[_key(word)] = (
                f"{', '.join(word.unknown)}: only a shell that runs the script knows its value: write "
                "the value in its place"
            )
        elif (reason := _set(settings, parser, word.text)) is not None:
            unread[_key(word)] = reason
    return settings, unread


def _key(word: Word) -> str:
    return word.text.partition("=")[0].lstrip("+~")


def _no_override(words: list[Word], index: int) -> dict[str, str]:
    """What other arguments bring: a file of settings, or unknown ones."""
    word = words[index]
    if option := _FILE_OPTION.fullmatch(word.text):
        following = words[index + 1].text if index + 1 < len(words) else ""
        return {option[1]: f"{option[2] or following}: its settings are not read: import that file too"}
    return dict.fromkeys(word.unknown, "arguments that only a shell that runs the script knows")


def _set(settings: DictConfig, parser: OverridesParser, text: str) -> str | None:
    """Apply an override; the reason if that is not possible."""
    try:
        override = parser.parse_override(text.replace("~/", f"{_HOME}/"))
        key = override.key_or_group
        if "/" in key or override.package or key.startswith("hydra."):
            return COMPOSITION
        if override.is_sweep_override():
            return "several values to try one by one: give one"
        value = None if override.is_delete() else _with_home(override.value())
        OmegaConf.update(settings, key, value, merge=True, force_add=True)
    except (HydraException, OmegaConfBaseException) as error:
        return f"not read: {' '.join(str(error).split())}"
    return None


def _with_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_home(item) for item in value]
    return value.replace(f"{_HOME}/", "~/") if isinstance(value, str) else value
