"""The keys of `env_config` for environments of other packages, which are not imported for them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from tailrace.config import Config


class GymnasiumConfig(Config, frozen=True, kw_only=True):
    """The keys of `env_config` for `env_type: gymnasium`."""

    id: str
    """Name of a registered environment, for example `Taxi-v3`; `module:Name-v0` imports the module
    that registers it first."""

    kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Keyword arguments of `gymnasium.make`."""

    observation: Literal["auto", "ansi", "space"] = "auto"
    """What the model reads. `ansi`: the environment's rendering as text; `space`: its observation;
    `auto`: the rendering if the environment has one."""

    to_text: str = ""
    """`module:function` that makes a text of an observation, instead."""

    actions: tuple[str, ...] = ()
    """Words for the actions of a discrete space, in its order; empty: their numbers."""

    to_action: str = ""
    """`module:function` that makes an action of a reply, or None if it holds none, instead."""

    instructions: str = ""
    """Text before the first observation."""

    max_turns: int = 100
    """Replies after which the episode is truncated; the environment's own limit counts as well."""

    invalid_action_penalty: float = 0.0
    """Subtracted from the reward of a turn whose reply has no action."""

    success_return: float | None = None
    """An episode whose rewards add up to this is a success. null: what the environment says in its
    last `info` as `success` or `is_success`, else whether its return is positive."""

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError("max_turns must be at least 1")
        if self.invalid_action_penalty < 0:
            raise ValueError("invalid_action_penalty must not be negative: it is subtracted")
        if self.actions and self.to_action:
            raise ValueError("actions and to_action are both given: keep one")
        if self.to_text and self.observation != "auto":
            raise ValueError("observation and to_text are both given: keep one")


class VerifiersConfig(Config, frozen=True, kw_only=True):
    """The keys of `env_config` for `env_type: verifiers`."""

    env_id: str
    """Name of an installed environment, as `verifiers.load_environment` takes it; or `module:name` of
    a function or class that makes one, such as `verifiers:ReasoningGymEnv`."""

    env_args: dict[str, Any] = msgspec.field(default_factory=dict)
    """Its arguments."""

    split: Literal["train", "held_out"] = "train"
    """Which of its data sets seeds choose rows from: `train`, or `held_out`, the one that it has for
    evaluation."""

    max_turns: int = 100
    """Replies after which the episode is truncated; the environment's own limit counts as well."""

    success_reward: float = 1.0
    """A score of at least this is a success."""

    def __post_init__(self) -> None:
        if not self.env_id:
            raise ValueError("env_id must name an environment of verifiers")
        if self.max_turns < 1:
            raise ValueError("max_turns must be at least 1")


class OpenEnvConfig(Config, frozen=True, kw_only=True):
    """The keys of `env_config` for `env_type: openenv`."""

    base_url: str
    """Where the server is, for example `http://localhost:8000`."""

    action_field: str = "message"
    """Field of an action that takes the model's reply."""

    action: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further fields of every action."""

    to_action: str = ""
    """`module:function` that makes the action (a dict) of a reply, instead."""

    observation_field: str = ""
    """Field of an observation that the model reads; empty: all of them, as JSON."""

    to_text: str = ""
    """`module:function` that makes a text of an observation (a dict), instead."""

    reset: dict[str, Any] = msgspec.field(default_factory=dict)
    """Arguments of every `reset`, besides the seed."""

    instructions: str = ""
    """Text before the first observation."""

    max_turns: int = 100
    """Replies after which the episode is truncated."""

    success_return: float = 1.0
    """An episode whose rewards add up to this is a success."""

    connect_timeout_s: float = 10.0
    """How long connecting may take."""

    message_timeout_s: float = 60.0
    """How long the server may take to answer."""

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
