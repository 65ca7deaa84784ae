"""Text environments with gymnasium's API, by name.

Every environment here is a `gymnasium.Env[str, str]`: observations are what the model reads, actions
are the model's replies. Its last `info` carries `success` (float). An environment is a pure function
of its configuration, the seed of `reset` and the replies, so that an interrupted episode can be
replayed from its journal.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

import gymnasium

from tailrace.envs.frozen_lake import FrozenLakeText

__all__ = ["ENV_TYPES", "FrozenLakeText", "UnknownEnvTypeError", "make_env"]

ENV_TYPES: dict[str, Callable[..., gymnasium.Env[str, str]]] = {
    "frozen_lake": FrozenLakeText,
}


class UnknownEnvTypeError(ValueError):
    """No environment has this `env_type`. Attributes: `env_type`, `valid` (the known names)."""

    def __init__(self, env_type: str, valid: tuple[str, ...]) -> None:
        near = difflib.get_close_matches(env_type, valid, n=1, cutoff=0.5)
        remedy = f"did you mean {near[0]!r}?" if near else f"valid types: {', '.join(sorted(valid))}"
        super().__init__(f"unknown env_type {env_type!r}; {remedy}")
        self.env_type = env_type
        self.valid = valid


def make_env(env_type: str, env_config: Mapping[str, Any]) -> gymnasium.Env[str, str]:
    """A new environment; `ValueError` names an unknown type or key, and the closest valid one."""
    if env_type not in ENV_TYPES:
        raise UnknownEnvTypeError(env_type, tuple(ENV_TYPES))
    return ENV_TYPES[env_type](**env_config)
