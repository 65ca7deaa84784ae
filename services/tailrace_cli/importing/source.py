"""Reading a configuration with its references to itself (`${...}`)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tailrace.config import ConfigError

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_NO_SETTING = "_target_"  # a class of that system's own
_COMPOSITION = ("defaults", "hydra")


def read_source(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The settings of a YAML file, and those that cannot be read, with the reason, by dotted key.

    Raises `ConfigError` for a file that is none.
    """
    try:
        content = OmegaConf.load(path)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, DictConfig):
        raise ConfigError(f"{path}: expected keys at the top level")
    unread = {
        key: "composition by Hydra: give the composed configuration instead"
        for key in _COMPOSITION
        if key in content
    }
    settings = {
        str(key): _plain(content, key, str(key), unread) for key in content if key not in _COMPOSITION
    }
    return settings, unread


def references(path: Path) -> frozenset[str]:
    """The keys that others refer to."""
    return frozenset(_REFERENCE.findall(path.read_text(encoding="utf-8")))


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
