"""Text environments with gymnasium's API, by name.

Every environment here is a `gymnasium.Env[str, str]`: the model reads the observations, and its replies
are the actions. The last `info` contains `success` (float). An environment is a pure function of its
configuration, the seed of `reset` and the replies, so that an interrupted episode can be replayed from
its journal. `env_type: module:Class` names a class of yours instead (`tailrace.sdk.env.Env`); its
constructor gets the keys of `env_config`.

A new type is a file here and a line in `ENV_TYPES`.
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tailrace.config import Config, ConfigError, decode_config
from tailrace.foreign import ForeignCodeError
from tailrace.import_path import load_object
from tailrace.sdk.env import Env
from tailrace_envs.baselines import Player
from tailrace_envs.frozen_lake import FrozenLakeText

__all__ = [
    "ENV_TYPES",
    "FrozenLakeText",
    "UnknownEnvTypeError",
    "check_env_config",
    "check_env_type",
    "env_baselines",
    "env_config_kind",
    "env_maker",
    "make_env",
]


class EnvType(NamedTuple):
    """Import paths of an environment, so that only the played ones are imported."""

    maker: str
    config: str  # Struct of `env_config`, in a module that imports without the environment's packages
    extra: str = ""  # extra of the distribution that the environment needs
    baselines: str = ""  # function that returns players by name (`tailrace_envs.baselines`)


ENV_TYPES: dict[str, EnvType] = {
    "frozen_lake": EnvType(
        "tailrace_envs.frozen_lake:FrozenLakeText",
        "tailrace_envs.frozen_lake:FrozenLakeConfig",
        baselines="tailrace_envs.frozen_lake_expert:baselines",
    ),
    "sokoban": EnvType(
        "tailrace_envs.sokoban.environment:SokobanText",
        "tailrace_envs.sokoban.config:SokobanConfig",
        baselines="tailrace_envs.sokoban.expert:baselines",
    ),
    "webshop": EnvType(
        "tailrace_envs.webshop.environment:WebShopText",
        "tailrace_envs.webshop.config:WebShopConfig",
        "webshop",
        "tailrace_envs.webshop.expert:baselines",
    ),
    "maths": EnvType(
        "tailrace_envs.maths.environment:MathsText", "tailrace_envs.maths.config:MathsConfig"
    ),
    "gymnasium": EnvType(
        "tailrace_envs.published.gymnasium_env:GymnasiumText",
        "tailrace_envs.published.config:GymnasiumConfig",
    ),
    "verifiers": EnvType(
        "tailrace_envs.published.verifiers_env:VerifiersText",
        "tailrace_envs.published.config:VerifiersConfig",
        "verifiers",
    ),
    "openenv": EnvType(
        "tailrace_envs.published.openenv_env:OpenEnvText",
        "tailrace_envs.published.config:OpenEnvConfig",
        "openenv",
    ),
}

_CALLS: dict[str, tuple[tuple[str, ...], Mapping[str, int]]] = {
    "reset": ((), {"seed": 0}),
    "step": (("reply",), {}),
    "close": ((), {}),
}


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
    """Makes an environment; `ValueError` names an unknown type or key and the closest valid one."""
    env = env_maker(env_type)(**env_config)
    _check_methods(env_type, env)
    return env


def env_maker(env_type: str) -> Callable[..., Env]:
    """Returns the constructor of a type; it takes the keys of `env_config`."""
    check_env_type(env_type)
    maker = _load(env_type)
    if isinstance(maker, type):
        _require_methods(env_type, maker)
    return maker


def _require_methods(env_type: str, found: object) -> None:
    missing = [name for name in _CALLS if not callable(getattr(found, name, None))]
    if missing:
        raise ConfigError(
            f"env_type: {env_type!r} has no {' and no '.join(missing)}: an environment has the methods "
            "of tailrace.sdk.env.Env"
        )


def _check_methods(env_type: str, env: object) -> None:
    """Raises `ConfigError` for an environment whose methods cannot be called as they will be."""
    _require_methods(env_type, env)
    for name, (args, kwargs) in _CALLS.items():
        method = getattr(env, name)
        if inspect.iscoroutinefunction(method):
            raise ConfigError(
                f"env_type: {env_type!r}: {name} is async: write a plain `def {name}`, and set "
                "`in_threads: true` if it waits"
            )
        try:
            inspect.signature(method).bind(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(
                f"env_type: {env_type!r}: {name} cannot be called as {name}({_shown(args, kwargs)}): "
                f"{error}: write it as in tailrace.sdk.env.Env"
            ) from error
        except ValueError:  # built-in code without a signature
            continue


def _shown(args: tuple[str, ...], kwargs: Mapping[str, int]) -> str:
    return ", ".join((*args, *(f"{name}={value}" for name, value in kwargs.items())))


def check_env_type(env_type: str) -> None:
    """Raises `UnknownEnvTypeError` for an unknown name without a colon; imports nothing."""
    if ":" not in env_type and env_type not in ENV_TYPES:
        raise UnknownEnvTypeError(env_type, tuple(ENV_TYPES))


def check_env_config(env_type: str, env_config: Mapping[str, Any]) -> None:
    """Raises the error that the constructor would raise for wrong keys and values; makes nothing.

    The keys of a user's class are not checked.
    """
    check_env_type(env_type)
    kind = env_config_kind(env_type)
    if kind is not None:
        decode_config(env_config, kind, "env_config")


def env_config_kind(env_type: str) -> type[Config] | None:
    """Returns the Struct of a type's `env_config`; None for a user's class."""
    known = ENV_TYPES.get(env_type)
    if known is None:
        return None
    kind = load_object(known.config, "env_type")
    assert isinstance(kind, type)
    assert issubclass(kind, Config)
    return kind


def env_baselines(env_type: str) -> Mapping[str, Player[Any]]:
    """Returns the baseline players of a type, by name; a user's class has them as `baselines`."""
    known = ENV_TYPES.get(env_type)
    if known is None:
        return getattr(env_maker(env_type), "baselines", {})
    players: Mapping[str, Player[Any]] = {}
    if known.baselines:
        players = _load_object(env_type, known.baselines)()
    return players


def _load(env_type: str) -> Callable[..., Env]:
    known = ENV_TYPES.get(env_type, EnvType(env_type, ""))
    maker: Callable[..., Env] = _load_object(env_type, known.maker)
    return maker


def _load_object(env_type: str, path: str) -> Any:
    extra = ENV_TYPES[env_type].extra if env_type in ENV_TYPES else ""
    try:
        return load_object(path, "env_type")
    except ConfigError as error:
        cause = error.__cause__
        if not extra or not isinstance(cause, ForeignCodeError):
            raise
        raise ConfigError(
            f"env_type {env_type!r} needs a package that does not import ({cause.error}): "
            f"pip install 'tailrace[{extra}]'"
        ) from error
