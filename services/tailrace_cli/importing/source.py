"""Reads a configuration of another system: a YAML file, a list of `key=value`, or words of a command.

Hydra composes a file with the `defaults:` in its place, and Hydra's grammar reads the values of
overrides, as the trainers do. Shell scripts are not read: only a shell that runs one knows the words
that the trainer gets.
"""

import re
import shlex
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tailrace.config import ConfigError
from tailrace.config.yaml_text import checked_node
from tailrace_cli.experiment import compose_file

COMPOSITION = "composition by Hydra"
_OVERRIDE = re.compile(r"(?:\+{0,2}[A-Za-z_][\w./@-]*=.*|~[A-Za-z_][\w./@-]*(?:=.*)?)", re.DOTALL)
_FILE_OPTION = re.compile(r"(--config(?:[-_](?:path|name|dir))?|-cn|-cp|-cd)(?:=(.*))?", re.DOTALL)
_ONLY_SHELL = re.compile(r"\$\(|`|\$\w+")
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)")
_LAUNCHER = re.compile(r"python[\d.]*|torchrun|accelerate|deepspeed")
_OPENING, _CLOSING = "[{(", "]})"
_MAX_DEPTH = 50
_HOME = "TAILRACE_HOME"  # stands for ~, which Hydra's grammar does not know
_IGNORED = "_target_"  # names a class of that system
_COMPOSITION_KEYS = ("defaults", "hydra")
_EXPECTED = "expected keys at the top level of a YAML file, lines key=value, or a YAML list of them"


class ForeignConfig(NamedTuple):
    """A configuration of another system."""

    name: str  # shown in the experiment
    settings: dict[str, Any]
    unread: dict[str, str]  # settings that cannot be read: reasons by dotted name
    references: frozenset[str]  # keys and sections to which others refer by `${...}`


def read_source(words: Sequence[str]) -> ForeignConfig:
    """Reads a file, or the words that a shell passes to a trainer, or a file with overrides behind it.

    Raises `ConfigError` if there are no settings.
    """
    first, overrides = words[0], words[1:]
    if (overrides and Path(first).suffix not in (".yaml", ".yml")) or _is_override(first):
        name, content = "the words of a command", OmegaConf.create({})
        unread = _update(content, words)
    else:
        name = " ".join([Path(first).name, *overrides])
        content, unread = _file(Path(first))
        unread |= _update(content, overrides)
    if not content and not unread:
        raise ConfigError(f"{first} is empty: {_EXPECTED}")
    unread |= {key: COMPOSITION for key in _COMPOSITION_KEYS if key in content and key not in unread}
    settings = {
        str(key): _resolved(content, key, str(key), unread)
        for key in content
        if key not in _COMPOSITION_KEYS
    }
    references = frozenset(_REFERENCE.findall(OmegaConf.to_yaml(content)))
    return ForeignConfig(name, settings, unread, references)


def _is_override(word: str) -> bool:
    return _OVERRIDE.fullmatch(word) is not None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is no text in UTF-8 (byte {error.start}): save it as UTF-8"
        ) from error


def _file(path: Path) -> tuple[DictConfig, dict[str, str]]:
    """Returns the settings of a file by its text: keys, a list of overrides, or lines of them."""
    text = _text(path)
    _refuse_script(path, text)
    try:
        node = checked_node(text)
        if node is None:
            return OmegaConf.create({}), {}
        content = None if isinstance(node, yaml.ScalarNode) else OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:  # of a number too long
        if (words := _listed(text.splitlines())) is not None:
            return _overrides(words)
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if isinstance(content, DictConfig):
        return _composed(path, content)
    words = _listed(text.splitlines() if content is None else map(str, content))
    if words is None:
        raise ConfigError(f"{path} holds no settings: {_EXPECTED}")
    return _overrides(words)


def _refuse_script(path: Path, text: str) -> None:
    lines = (line.split() for line in text.splitlines())
    calls = any(line and _LAUNCHER.fullmatch(PurePath(line[0]).name) for line in lines)
    if path.suffix in (".sh", ".bash") or text.startswith("#!") or calls:
        raise ConfigError(
            f"{path} is a shell script, which only a shell can read. In a copy of it, put `tailrace "
            "import-config SYSTEM --` in place of `python3 -m ...`, and run the copy; or put `printf "
            "'%s\\n'` there, and import the list of words that the copy prints"
        )


def _composed(path: Path, content: DictConfig) -> tuple[DictConfig, dict[str, str]]:
    """Returns the settings of a YAML file, with its `defaults:` if they are in their place."""
    if "defaults" in content:
        try:
            with warnings.catch_warnings():  # of Hydra, about a list without `_self_`
                warnings.simplefilter("ignore", UserWarning)
                composed = compose_file(path)
        except ConfigError as error:
            reason = str(error).removeprefix(f"{path}: ")
            return content, {**_nest(content), "defaults": f"{COMPOSITION} failed: {reason}"}
        OmegaConf.set_struct(composed, False)
        return composed, _nest(composed)
    return content, _nest(content)


def _nest(content: DictConfig) -> dict[str, str]:
    """Moves dotted keys at the top level to the sections that they name; returns those without one."""
    plain: Any = OmegaConf.to_container(content)
    unread: dict[str, str] = {}
    for key in [key for key in plain if isinstance(key, str) and "." in key]:
        del content[key]
        if reason := _put(content, key, plain[key]):
            unread[key] = reason
    return unread


def _put(settings: DictConfig, key: str, value: Any) -> str:
    """Sets a dotted key; returns the reason if that is not possible."""
    try:
        OmegaConf.update(settings, key, value, merge=True, force_add=True)
    except OmegaConfBaseException as error:
        return f"not read: {' '.join(str(error).split())}"
    except (ValueError, TypeError):  # a name where the place in a list is expected
        return f"not read: a list stands where {key} needs a section: keep one of both"
    return ""


def _listed(lines: Iterable[str]) -> list[str] | None:
    """Returns the overrides of a list, one on each line; None if a line holds something else.

    A line that was copied from a script still has its quotes, and perhaps a `\\` at its end.
    """
    words = []
    for line in map(str.strip, lines):
        try:
            unquoted = shlex.split(line.removesuffix("\\"), comments=True)
        except ValueError:
            unquoted = [line]
        words += unquoted if all(map(_is_override, unquoted)) else [line]
    return words if words and all(map(_is_override, words)) else None


def _overrides(words: Sequence[str]) -> tuple[DictConfig, dict[str, str]]:
    """Returns the settings of listed words, in which no shell has replaced variables."""
    content = OmegaConf.create({})
    at_home = [re.sub(r"\$(?:HOME\b|\{HOME\})", "~", word) for word in words]
    unread = {
        _key(word): f"{found[0]}: only a shell knows its value: write the value in its place"
        for word in at_home
        if (found := _ONLY_SHELL.search(word))
    }
    return content, unread | _update(content, [word for word in at_home if _key(word) not in unread])


def _key(word: str) -> str:
    return word.partition("=")[0].lstrip("+~")


def _update(content: DictConfig, words: Sequence[str]) -> dict[str, str]:
    """Applies the overrides among `words` to `content`; returns reasons for those that it cannot."""
    unread: dict[str, str] = {}
    parser = OverridesParser.create()
    for index, word in enumerate(words):
        if option := _FILE_OPTION.fullmatch(word):
            file = option[2] or "".join(words[index + 1 : index + 2])
            unread[option[1]] = f"{file}: its settings are not read: name that file before the words"
        elif _is_override(word) and (reason := _set(content, parser, word)):
            unread[_key(word)] = reason
    return unread


def _set(settings: DictConfig, parser: OverridesParser, word: str) -> str:
    """Applies an override; returns the reason if that is not possible."""
    if _depth(word) > _MAX_DEPTH:  # Hydra's grammar takes time that is quadratic in it
        return f"not read: brackets are nested more than {_MAX_DEPTH} deep"
    try:
        override = parser.parse_override(word.replace("~/", f"{_HOME}/"))
        key = override.key_or_group
        if "/" in key or override.package or key.startswith("hydra."):
            return f"{COMPOSITION}: give the composed configuration instead"
        if override.is_sweep_override():
            return "several values to try one by one: give one"
        value = None if override.is_delete() else _with_home(override.value())
    except (HydraException, ValueError) as error:  # of a number too long
        return f"not read: {' '.join(str(error).split())}"
    return _put(settings, key, value)


def _depth(word: str) -> int:
    """Most brackets that are open at once."""
    steps = ((char in _OPENING) - (char in _CLOSING) for char in word)
    return max(accumulate(steps), default=0)


def _with_home(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_home(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _with_home(item) for key, item in value.items()}
    return value.replace(f"{_HOME}/", "~/") if isinstance(value, str) else value


def _resolved(parent: DictConfig, key: Any, name: str, unread: dict[str, str]) -> Any:
    """Returns the value with its references followed; None, with a reason in `unread`, if one fails."""
    try:
        value = parent[key]
        if isinstance(value, ListConfig):
            return OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException as error:
        unread[name] = str(error).splitlines()[0]
        return None
    if isinstance(value, DictConfig):
        keys = {inner: str(inner) for inner in value if inner != _IGNORED}
        return {
            shown: _resolved(value, inner, f"{name}.{shown}", unread) for inner, shown in keys.items()
        }
    return value
