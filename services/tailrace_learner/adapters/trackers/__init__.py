"""Trackers: they show the rows of `metrics.jsonl` elsewhere. One class per file.

`config_execution.TRACKERS` declares the built-in ones; `module:name` names a class of a user. Both are
checked here when the learner starts: the package is installed, the methods exist with their parameters,
and the arguments have the types that the constructor declares.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, get_type_hints

import msgspec

from tailrace.config import ConfigError, RunConfig
from tailrace.config.suggestions import did_you_mean
from tailrace.import_path import load_object
from tailrace_learner.config_execution import TRACKERS
from tailrace_learner.ports import Tracker

MakeTracker = Callable[[], Tracker]

_METHODS = {"write": 1, "flush": 0, "close": 0}  # parameters beside self


def tracker_makers(run: RunConfig, chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, MakeTracker]:
    """Constructors of the chosen trackers by name, bound to their arguments.

    `chosen`: arguments by built-in name or `module:name`. `ConfigError` for a tracker that cannot work.
    """
    return {name: _maker(name, arguments, run) for name, arguments in chosen.items()}


def _maker(name: str, arguments: Mapping[str, Any], run: RunConfig) -> MakeTracker:
    key = f"learner.trackers.{name}"
    make = load_object(TRACKERS.get(name, name), key)
    package: str = getattr(make, "package", "")
    if package and find_spec(package) is None:
        raise ConfigError(f"{key} needs {package}: pip install 'tailrace[{package}]'")
    for method, num_parameters in _METHODS.items():
        _check_method(key, make, method, num_parameters)
    return partial(make, run, **_checked_arguments(key, make, arguments))


def _check_method(key: str, made: Any, name: str, num_parameters: int) -> None:
    method = getattr(made, name, None)
    wanted = f"def {name}({', '.join(['self', 'row'][: num_parameters + 1])})"
    if method is None:
        raise ConfigError(f"{key}: {made.__name__} has no method {name}: a tracker needs {wanted}")
    try:
        inspect.signature(method).bind(*[None] * (num_parameters + 1))
    except TypeError as error:
        raise ConfigError(
            f"{key}: {made.__name__}.{name}: {error}: a tracker needs {wanted}"
        ) from error


def _checked_arguments(key: str, make: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` converted to the types that the constructor declares."""
    parameters = list(inspect.signature(make).parameters.values())
    if not parameters:
        raise ConfigError(f"{key}: {make.__name__} must take the run as its first parameter")
    accepted = {one.name: one for one in parameters[1:] if one.kind is not one.VAR_KEYWORD}
    takes_any = len(accepted) < len(parameters) - 1
    for name, one in accepted.items():
        if one.default is one.empty and name not in arguments:
            raise ConfigError(f"{key}.{name} is missing: {make.__name__} needs it")
    if not takes_any and (unknown := sorted(arguments.keys() - accepted.keys())):
        remedy = did_you_mean(unknown[0], accepted) if accepted else "it takes none"
        raise ConfigError(f"{key}.{unknown[0]}: {make.__name__} takes no such argument: {remedy}")
    return {
        name: _converted(f"{key}.{name}", value, inspect.unwrap(make.__init__), name)
        for name, value in arguments.items()
    }


def _converted(key: str, value: Any, function: Any, name: str) -> Any:
    """`value` as the type of the argument `name`; `ConfigError` names `key`."""
    # Alone: the types of other arguments may be imported for type checkers only.
    hint = {each: kind for each, kind in function.__annotations__.items() if each == name}
    try:
        hints = get_type_hints(SimpleNamespace(__annotations__=hint), function.__globals__)
        return msgspec.convert(value, hints.get(name, Any))
    except (msgspec.ValidationError, NameError) as error:
        raise ConfigError(f"{key}: {error}") from error
