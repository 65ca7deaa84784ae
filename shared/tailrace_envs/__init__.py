"""Text environments with gymnasium's API, by name.

Every environment here is a `gymnasium.Env[str, str]`: observations are what the model reads, actions
are the model's replies. Its last `info` carries `success` (float). An environment is a pure function
of its configuration, the seed of `reset` and the replies, so that an interrupted episode can be
replayed from its journal. `env_type: module:Class` names any class of yours instead
(`tailrace.sdk.env.Env`); its constructor gets the keys of `env_config`.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from tailrace.config import Config, ConfigError, decode_config
from tailrace.foreign import ForeignCodeError
from tailrace.import_path import load_object
from tailrace.sdk.env import Env
from tailrace_envs.frozen_lake import FrozenLakeText

__all__ = [
    "ENV_TYPES",
    "FrozenLakeText",
    "UnknownEnvTypeError",
    "check_env_config",
    "check_env_type",
    "env_config_kind",
    "env_maker",
    "make_env",
]

# By name, so that only what an experiment plays is imported.
ENV_TYPES: dict[str, str] = {
    "frozen_lake": "tailrace_envs.frozen_lake:FrozenLakeText",
    "sokoban": "tailrace_envs.sokoban.environment:SokobanText",
    "webshop": "tailrace_envs.webshop.environment:WebShopText",
    "maths": "tailrace_envs.maths.environment:MathsText",
    "gymnasium": "tailrace_envs.published.gymnasium_env:GymnasiumText",
    "verifiers": "tailrace_envs.published.verifiers_env:VerifiersText",
    "openenv": "tailrace_envs.published.openenv_env:OpenEnvText",
}

# The keys of `env_config`, by name, in modules that import without the packages of the environments.
_CONFIGS: dict[str, str] = {
    "frozen_lake": "tailrace_envs.frozen_lake:FrozenLakeConfig",
    "sokoban": "tailrace_envs.sokoban.config:SokobanConfig",
    "webshop": "tailrace_envs.webshop.config:WebShopConfig",
    "maths": "tailrace_envs.maths.config:MathsConfig",
    "gymnasium": "tailrace_envs.published.config:GymnasiumConfig",
    "verifiers": "tailrace_envs.published.config:VerifiersConfig",
    "openenv": "tailrace_envs.published.config:OpenEnvConfig",
}

_EXTRAS = {"webshop": "webshop", "verifiers": "verifiers", "openenv": "openenv"}
_METHODS = ("reset", "step", "close")


class UnknownEnvTypeError(ValueError):
    """No environment has this `env_type`. Attributes: `env_type`, `valid` (the known names)."""

    def __init__(self, env_type: str, valid: tuple[str, ...]) -> None:
        near = difflib.get_close_matches(env_type, valid, n=1, cutoff=0.5)
        known = f"valid types: {', '.join(sorted(valid))}, or module:Class of your own"
        super().__init__(
            f"unknown env_type {env_type!r}; {f'did you mean {near[0]!r}?' if near else known}"
        )
        self.env_type = env_type
        self.valid = valid


def make_env(env_type: str, env_config: Mapping[str, Any]) -> Env:
    """A new environment; `ValueError` names an unknown type or key, and the closest valid one."""
    return env_maker(env_type)(**env_config)


def env_maker(env_type: str) -> Callable[..., Env]:
    """What makes environments of a type from the keys of `env_config`."""
    check_env_type(env_type)
    maker = _load(env_type)
    missing = [name for name in _METHODS if not hasattr(maker, name)]
    if isinstance(maker, type) and missing:
        raise ConfigError(
            f"env_type: {env_type!r} has no {' and no '.join(missing)}: an environment has the methods "
            "of tailrace.sdk.env.Env"
        )
    return maker


def check_env_type(env_type: str) -> None:
    """Raise `UnknownEnvTypeError` for a name that is none of ours; imports nothing."""
    if ":" not in env_type and env_type not in ENV_TYPES:
        raise UnknownEnvTypeError(env_type, tuple(ENV_TYPES))


def check_env_config(env_type: str, env_config: Mapping[str, Any]) -> None:
    """Raise what making the environment would raise for keys and values that its type does not take.

    Nothing is made. What a class of one's own takes is its matter.
    """
    check_env_type(env_type)
    kind = env_config_kind(env_type)
    if kind is not None:
        decode_config(env_config, kind, "env_config")


def env_config_kind(env_type: str) -> type[Config] | None:
    """The Struct of a type's `env_config`; None for types that are none of ours."""
    dotted = _CONFIGS.get(env_type)
    if dotted is None:
        return None
    kind = load_object(dotted, "env_type")
    assert isinstance(kind, type)
    assert issubclass(kind, Config)
    return kind


def _load(env_type: str) -> Callable[..., Env]:
    try:
        return load_object(ENV_TYPES.get(env_type, env_type), "env_type")
    except ConfigError as error:
        extra = _EXTRAS.get(env_type)
        cause = error.__cause__
        if extra is None or not isinstance(cause, ForeignCodeError):
            raise
        raise ConfigError(
            f"env_type {env_type!r} needs a package that does not import ({cause.error}): "
            f"pip install 'tailrace[{extra}]'"
        ) from error
