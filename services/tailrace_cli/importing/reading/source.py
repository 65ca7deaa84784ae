"""Reading a configuration: YAML with its references to itself (`${...}`), or a trainer's overrides."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tailrace.config import ConfigError
from tailrace_cli.importing.reading import overrides
from tailrace_cli.importing.reading.overrides import COMPOSITION, Settings

_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?([\w.]+)")
_NO_SETTING = "_target_"  # a class of that system's own
_COMPOSITION = ("defaults", "hydra")
_SCRIPTS = (".sh", ".bash")
_EXPECTED = (
    "expected keys at the top level of a YAML file, lines key=value, or a shell script that calls a "
    "trainer with key=value"
)


def read_source(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of a file, and those that cannot be read, with the reason, by dotted key.

    Raises `ConfigError` for a file that holds none.
    """
    content, unread = _settings(path, _text(path))
    unread |= {key: COMPOSITION for key in _COMPOSITION if key in content}
    settings = {
        str(key): _plain(content, key, str(key), unread) for key in content if key not in _COMPOSITION
    }
    return settings, unread


def references(path: Path) -> frozenset[str]:
    """The keys and sections that others refer to."""
    return frozenset(_REFERENCE.findall(_text(path)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path} is no text in UTF-8 (byte {error.start}): save it as UTF-8"
        ) from error


def _settings(path: Path, text: str) -> Settings:
    """By what the text is."""
    if path.suffix in _SCRIPTS or text.startswith("#!"):
        found = overrides.in_text(text, str(path))
    else:
        found = _of_yaml(path, text)
    if found is None:
        raise ConfigError(f"{path} holds no settings: {_EXPECTED}")
    if not found[0] and not found[1]:
        raise ConfigError(f"{path} is empty: {_EXPECTED}")
    return found


def _of_yaml(path: Path, text: str) -> Settings | None:
    """Keys, a list of overrides, or text that is no YAML but a script's."""
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            return OmegaConf.create({}), {}
        if isinstance(node, yaml.ScalarNode):
            return overrides.in_text(text, str(path))
        content = OmegaConf.create(text)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        if (found := overrides.in_text(text, str(path))) is not None:
            return found
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if isinstance(content, ListConfig):
        return overrides.in_list(content)
    return _nested(content), {}


def _nested(content: DictConfig) -> DictConfig:
    """Dotted keys at the top level as the sections that they stand for."""
    plain: Any = OmegaConf.to_container(content)
    for key in [key for key in plain if isinstance(key, str) and "." in key]:
        del content[key]
        OmegaConf.update(content, key, plain[key], merge=True, force_add=True)
    return content


def _plain(parent: DictConfig, key: Any, name: str, unread: dict[str, str]) -> Any:
    """The value with references followed; where one leads nowhere, None and a reason in `unread`."""
    try:
        value = parent[key]
        if isinstance(value, ListConfig):
            return OmegaConf.to_container(value, resolve=True)
    except OmegaConfBaseException as error:
        unread[name] = str(error).splitlines()[0]
        return None
    if isinstance(value, DictConfig):
        keys = {inner: str(inner) for inner in value if inner != _NO_SETTING}
        return {key: _plain(value, inner, f"{name}.{key}", unread) for inner, key in keys.items()}
    return value
