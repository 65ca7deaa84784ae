"""Adapter for environments of gymnasium, unchanged, by id: `env_type: gymnasium`.

The model reads the environment's `ansi` rendering if it has one, else its observation as text. The
action space converts replies to actions. Functions of yours can replace both. A reply without an action
gets a note and the same text; the environment makes no step.
"""

import re
from collections.abc import Callable
from typing import Any

import gymnasium

from tailrace.config import ConfigError, decode_config
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_object
from tailrace.sdk.env import NUMBER
from tailrace_envs.game import Answer, TextGame
from tailrace_envs.published.config import GymnasiumConfig
from tailrace_envs.published.spaces_text import action_reader, observation_text

INVALID_NOTE = "Invalid action.\n"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_CURSOR = re.compile(r"\x1b\[[0-9;]*m(.)\x1b\[0m")


class GymnasiumText(TextGame):
    """Plays an environment of gymnasium. Options are the keys of `GymnasiumConfig`."""

    metadata = {"render_modes": ["rgb_array", "ansi"]}  # noqa: RUF012 gymnasium's declaration

    def __init__(self, **options: Any) -> None:
        self.config = config = decode_config(options, GymnasiumConfig, "env_config")
        super().__init__(config.max_turns)
        self._env = self._make()
        read = load_object(config.to_action, "to_action") if config.to_action else None
        self._read = read or action_reader(self._env.action_space, config.actions)
        self._describe = self._describer()
        self._text = ""
        self._return = 0.0
        self._reported_success: float | None = None
        self._ending = (False, False)  # of the environment itself: terminated, truncated

    def begin(self, seed: int) -> str:
        """See `TextGame`."""
        observation, _ = self._env.reset(seed=seed)
        self._text = self._describe(observation)
        self._return = 0.0
        self._reported_success = None
        return self.config.instructions + self._text

    def instructions(self) -> str:
        """See `TextGame`; every observation has the whole state."""
        return self.config.instructions

    def answer(self, reply: str) -> Answer:
        """See `TextGame`."""
        self._ending = (False, False)
        action = self._read(reply)
        if action is None:
            reward = 0.0 - self.config.invalid_action_penalty
            self._return += reward
            return Answer(INVALID_NOTE + self._text, reward, is_invalid=True)
        observation, gained, terminated, truncated, info = self._env.step(action)
        self._ending = (bool(terminated), bool(truncated))
        self._text = self._describe(observation)
        reward = float(gained)
        self._return += reward
        for key in ("success", "is_success"):
            if isinstance(info.get(key), NUMBER):
                self._reported_success = float(info[key])
        return Answer(self._text, reward, any(self._ending))

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """See `TextGame`; keeps the environment's own truncation apart from its end."""
        observation, reward, is_over, is_truncated, info = super().step(action)
        terminated, truncated = self._ending if is_over else (False, is_truncated)
        return observation, reward, terminated, truncated, info

    def success(self) -> float:
        """See `TextGame`."""
        min_return = self.config.success_return
        if min_return is not None:
            return float(self._return >= min_return)
        return self._reported_success if self._reported_success is not None else float(self._return > 0)

    def render(self) -> Any:
        """Renders the environment's frame, an array or a text; without one, the text for the model."""
        if self._env.render_mode is None:
            return super().render()
        self.require_reset()
        frame = self._env.render()
        return plain_text(frame) if isinstance(frame, str) else frame

    def close(self) -> None:
        """See `gymnasium.Env`."""
        self._env.close()

    def _make(self) -> gymnasium.Env[Any, Any]:
        config = self.config
        try:
            with foreign_code(f"gymnasium.make({config.id!r})"):
                mode = config.kwargs.get("render_mode") or self._render_mode()
                rendering = {"render_mode": mode} if mode else {}
                return gymnasium.make(config.id, **{**config.kwargs, **rendering})
        except ForeignCodeError as error:
            raise ConfigError(
                f"id {config.id!r} with kwargs {config.kwargs}: {error.error}: correct them, or "
                "install the package that registers it and name it as module:Name-v0"
            ) from error

    def _render_mode(self) -> str | None:
        """Render mode to request: text for the model, else pictures, else none."""
        config = self.config
        probe = gymnasium.make(config.id, **config.kwargs)
        known = probe.metadata.get("render_modes", [])
        probe.close()
        if "ansi" in known and config.observation != "space" and not config.to_text:
            return "ansi"
        return "rgb_array" if "rgb_array" in known else None

    def _describer(self) -> Callable[[Any], str]:
        config, env = self.config, self._env
        if config.to_text:
            return load_object(config.to_text, "to_text")
        if env.render_mode == "ansi" and config.observation != "space":
            return lambda _: plain_text(str(env.render()))
        if config.observation == "ansi":
            raise ConfigError(
                f"observation: {config.id} does not render as ansi: use observation space, or to_text"
            )
        return lambda observation: observation_text(env.observation_space, observation) + "\n"


def plain_text(rendered: str) -> str:
    """Removes terminal colours; a highlighted letter gets brackets."""
    return _COLOUR.sub("", _CURSOR.sub(r"[\1]", rendered))
