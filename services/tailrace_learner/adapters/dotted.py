"""Functions that the user names as `package.module:function`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from tailrace.config import ConfigError


def load_function(dotted: str, key: str) -> Callable[..., Any]:
    """The function; `ConfigError` names the key and what is missing."""
    module_name, _, name = dotted.partition(":")
    if not module_name or not name:
        raise ConfigError(f"{key}: {dotted!r} must look like package.module:function")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{key}: cannot import {module_name!r} ({error}): correct the name, or install its package "
            "where the learner runs"
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        raise ConfigError(f"{key}: module {module_name!r} has no function {name!r}")
    return function  # type: ignore[no-any-return]
