"""Keys of `env_config` for environments of other packages. This module imports none of them."""

from typing import Any, Literal

import msgspec

from tailrace.config import Config
from tailrace_envs.rewards import check_rewards


class GymnasiumConfig(Config, frozen=True, kw_only=True):
    """The keys of `env_config` for `env_type: gymnasium`."""

    id: str
    """Name of a registered environment, for example `Taxi-v3`; `module:Name-v0` imports the module
    that registers it first."""

    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`."""

    observation: Literal["auto", "ansi", "space"] = "auto"
    """Text for the model. `ansi`: the environment's rendering as text; `space`: its observation;
    `auto`: the rendering if the environment has one."""

    to_text: str = ""
    """`module:function` from an observation to its text, instead of `observation`."""

    actions: tuple[str, ...] = ()
    """Names of the actions of a discrete space, in its order; empty: their numbers."""

    to_action: str = ""
    """`module:function` from a reply to an action, or to None if the reply has none, instead of
    `actions`."""

    instructions: str = ""
    """Text before the first observation."""

    max_turns: int = 100
    """Replies after which the episode is truncated. The environment's own limit applies too."""

    invalid_action_penalty: float = 0.0
    """Penalty that is subtracted from the reward of a reply without an action."""

    success_return: float | None = None
    """Sum of rewards from which an episode is a success. null: the value `success` or `is_success` in
    the environment's last `info`; without it, any positive return is a success."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError("max_turns must be at least 1")
        check_rewards(self)
        if self.actions and self.to_action:
            raise ValueError("actions and to_action are both given: keep one")
        if self.to_text and self.observation != "auto":
            raise ValueError("observation and to_text are both given: keep one")


class VerifiersConfig(Config, frozen=True, kw_only=True):
    """The keys of `env_config` for `env_type: verifiers`."""

    env_id: str
    """Name of an installed environment for `verifiers.load_environment`, or `module:name` of a function
    or class that makes one, such as `verifiers:ReasoningGymEnv`."""

    env_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of the environment."""

    split: Literal["train", "held_out"] = "train"
    """Data set that seeds select rows from: `train`, or `held_out`, the environment's data set for
    evaluation."""

    max_turns: int = 100
    """Replies after which the episode is truncated. The environment's own limit applies too."""

    success_reward: float = 1.0
    """Score from which an episode is a success."""

    def __post_init__(self) -> None:
        if not self.env_id:
            raise ValueError("env_id must name an environment of verifiers")
        if self.max_turns < 1:
            raise ValueError("max_turns must be at least 1")


class OpenEnvConfig(Config, frozen=True, kw_only=True):
    """The keys of `env_config` for `env_type: openenv`."""

    base_url: str
    """Address of the server, for example `http://localhost:8000`."""

    action_field: str = "message"
    """Field of an action that contains the model's reply."""

    action: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further fields of every action."""

    to_action: str = ""
    """`module:function` from a reply to the action (a dict), instead of `action_field` and `action`."""

    observation_field: str = ""
    """Field of an observation that the model reads; empty: all fields, as JSON."""

    to_text: str = ""
    """`module:function` from an observation (a dict) to its text, instead of `observation_field`."""

    reset: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of every `reset`, in addition to the seed."""

    instructions: str = ""
    """Text before the first observation."""

    max_turns: int = 100
    """Replies after which the episode is truncated."""

    success_return: float = 1.0
    """Sum of rewards from which an episode is a success."""

    connect_timeout_s: float = 10.0
    """Maximum time to connect."""

    message_timeout_s: float = 60.0
    """Maximum time that the server takes to answer."""

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://", "ws://", "wss://")):
            raise ValueError("base_url must begin with http://, https://, ws:// or wss://")
        if self.max_turns < 1:
            raise ValueError("max_turns must be at least 1")
        for key in ("connect_timeout_s", "message_timeout_s"):
            if getattr(self, key) <= 0:
                raise ValueError(f"{key} must be positive")
        if self.to_text and self.observation_field:
            raise ValueError("observation_field and to_text are both given: keep one")
