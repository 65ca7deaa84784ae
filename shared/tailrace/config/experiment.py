"""Decodes a resolved experiment file strictly, with errors that name key, file and remedy."""

import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from tailrace.config.base import Config, ConfigError, InvalidConfigError
from tailrace.config.keys import fields_of, literals_in, type_at
from tailrace.config.run import RunConfig
from tailrace.config.settings import ROOTS, apply_settings
from tailrace.config.suggestions import did_you_mean, not_one_of
from tailrace.config.yaml_text import load_yaml
from tailrace_protos.subjects import SERVICES

SECTIONS = (*SERVICES, "cluster")

C = TypeVar("C", bound=Config)


def load_experiment(path: str | Path) -> dict[str, Any]:
    """Returns the settings of an experiment file (YAML or JSON) under the keys that services read.

    Raises `ConfigError` for a file that it cannot read, and for settings that contradict each other.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        content = msgspec.json.decode(text) if Path(path).suffix == ".json" else load_yaml(text)
    except OSError as error:
        raise ConfigError(f"cannot read experiment file {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not text in UTF-8: {error}") from error
    except (yaml.YAMLError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} is not valid {Path(path).suffix[1:].upper()}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected keys at the top level, found {type(content).__name__}")
    return apply_settings(content, str(path)).content


def run_config(experiment: Mapping[str, Any], source: str) -> RunConfig:
    """Decodes the top-level keys; services decode their sections, and other names are errors."""
    top = {key: value for key, value in experiment.items() if key not in SECTIONS}
    return decode_config(top, RunConfig, source, also_valid=(*SECTIONS, *ROOTS))


def section_config(experiment: Mapping[str, Any], section: str, kind: type[C], source: str) -> C:
    """Decodes the section of one service; a missing section has all defaults."""
    content = experiment.get(section)
    return decode_config({} if content is None else content, kind, source, where=section)


def decode_config(
    content: object, kind: type[C], source: str, *, where: str = "", also_valid: tuple[str, ...] = ()
) -> C:
    """Strictly decodes `content`; `InvalidConfigError` names `source`, keys and closest valid keys.

    It lists every unknown key outside of lists and dicts, and the first of all other mistakes.
    """
    unusable = list(_unusable(content))
    problems = [f"{_join(where, path)}: {reason}" for path, reason in unusable]
    if any(reason == _HALF for _, reason in unusable):  # a message about it could not be printed
        raise InvalidConfigError(source, problems)
    while True:
        try:
            decoded = msgspec.convert(content, kind)
        except msgspec.ValidationError as error:
            reason = _with_keys(str(error), content, kind)
            problems.append(_explain(reason, content, kind, where, also_valid))
            content = _without_unknown_key(content, reason)
            if content is not None:
                continue
        if problems:
            raise InvalidConfigError(source, problems)
        return decoded


def _with_keys(message: str, content: object, kind: type[Config]) -> str:
    """Puts keys in place of each `[...]` of msgspec's message: of the entry that alone brings it."""
    named = message
    while found := _ENTRY.match(named):
        head, before, after = found.groups()
        steps = _STEPS.findall(before)
        keys = [
            key
            for key, value in _mapping_at(content, steps).items()
            if _message(_replaced(content, steps, {key: value}), kind) == message
        ]
        if not keys or not _PLAIN.fullmatch(str(keys[0])):
            return named
        named = f"{head}{_join(before, str(keys[0]))}{after}"
    return named


def _mapping_at(content: Any, steps: Sequence[str]) -> Mapping[Any, Any]:
    for step in steps:
        content = content[int(step)] if isinstance(content, list | tuple) else content[step]
    return content if isinstance(content, Mapping) else {}


def _replaced(content: Any, steps: Sequence[str], value: object) -> Any:
    """A copy of `content` with another value at the end of `steps`."""
    if not steps:
        return value
    copied: Any = list(content) if isinstance(content, list | tuple) else dict(content)
    step: Any = int(steps[0]) if isinstance(copied, list) else steps[0]
    copied[step] = _replaced(copied[step], steps[1:], value)
    return copied


def _message(content: object, kind: type[Config]) -> str:
    try:
        msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        return str(error)
    return ""


def _without_unknown_key(content: object, reason: str) -> object:
    """Returns `content` without the unknown key that `reason` names; None for another reason."""
    unknown = _UNKNOWN.match(reason)
    if unknown is None or "[" in (unknown.group(2) or ""):
        return None
    copied: Any = copy.deepcopy(content)
    place = copied
    for step in filter(None, (unknown.group(2) or "").split(".")):
        place = place[step]
    del place[unknown.group(1)]
    return copied


def _unusable(content: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields path and reason of values that types allow and nothing can use.

    These are `.nan`, which no comparison with a bound refuses; integers of more than 64 bits, which no
    system call accepts; texts with half of a character, which no message can carry.
    """
    if isinstance(content, Mapping):
        for key, value in content.items():
            name = _join(path, _escaped(str(key)))
            yield from _unusable(value, name)
            if _has_half(key):
                yield name, _HALF
    elif isinstance(content, list | tuple):
        for index, value in enumerate(content):
            yield from _unusable(value, f"{path}[{index}]")
    elif reason := _unusable_value(content):
        yield path, reason


def _unusable_value(value: object) -> str:
    if isinstance(value, float) and math.isnan(value):
        return "nan is not a number: give one"
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        return "the number takes more than 64 bits: give a smaller one"
    return _HALF if _has_half(value) else ""


_HALF = "a text with half of a character (a lone surrogate such as \\ud800) cannot be sent: correct it"


def _has_half(value: object) -> bool:
    return isinstance(value, str) and _escaped(value) != value


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


_ENTRY = re.compile(r"^(.* - at `\$\.?)([^`]*?)\[\.\.\.\]([^`]*`)$", re.DOTALL)
_STEPS = re.compile(r"[^.\[\]]+")
_PLAIN = re.compile(r"[^.`\[\]]+")
_UNKNOWN = re.compile(r"Object contains unknown field `([^`]+)`(?: - at `\$\.?([^`]*)`)?")
_MISSING = re.compile(r"Object missing required field (`[^`]+`)")
_WRONG_TYPE = re.compile(r"Expected `(.+)`, got `(?:str|int|float|bool)`")
_NO_NAME = "Invalid enum value "
_AT = re.compile(r"^(.*?)(?: - at `\$\.?([^`]*)`)?$", re.DOTALL)


def _explain(
    reason: str, content: object, kind: type[Config], where: str, also_valid: tuple[str, ...]
) -> str:
    """Rewrites msgspec's message as key, problem and remedy."""
    unknown = _UNKNOWN.match(reason)
    if unknown:
        key, parent = unknown.group(1), unknown.group(2) or ""
        valid = [
            *fields_of(type_at(msgspec.inspect.type_info(kind), parent)),
            *(also_valid if not parent else ()),
        ]
        return f"unknown key {_join(where, parent, key)!r}; {did_you_mean(key, valid)}"
    matched = _AT.match(reason)
    assert matched is not None
    path = matched.group(2) or ""
    place = _join(where, path)
    text = _MISSING.sub(r"the key \1 is missing: give it", matched.group(1))
    named = _with_names(text, kind, path)
    text = _with_value(text, content, path) if named == text else named
    return text if not place or text.startswith(f"{place}.") else f"{place}: {text}"


def _with_value(reason: str, content: object, path: str) -> str:
    """Adds the value to a `reason` about its type, if it stands at a plain path."""
    wrong = _WRONG_TYPE.fullmatch(reason)
    for step in path.split(".") if path else ():
        content = content.get(step) if isinstance(content, Mapping) else None
    if wrong is None or not isinstance(content, str | int | float):
        return reason
    remedy = f": write a list, [{content}]" if wrong.group(1) == "array" else ""
    return f"{reason} ({content!r}){remedy}"


def _with_names(reason: str, kind: type[Config], path: str) -> str:
    """Adds the possible names to `reason`, if `path` takes only some names."""
    names = literals_in(type_at(msgspec.inspect.type_info(kind), path))
    if not names:
        return reason
    given = reason.removeprefix(_NO_NAME)
    return not_one_of(given, names) if given != reason else f"{reason}; known are {', '.join(names)}"


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)
