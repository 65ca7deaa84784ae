"""Adapter for environments of the package verifiers, unchanged: `env_type: verifiers`.

An environment of verifiers calls the model, while agents call a Tailrace environment. Therefore its
rollout runs as a coroutine on another event loop and waits for the next reply at each model call. The
model reads the messages that a call adds; the rubric's score is the reward of the last step. The
environment must only append to the conversation and must not offer tools. Play other environments by a
workflow through the gateway.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import msgspec
import verifiers

from tailrace.config import ConfigError, decode_config
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_object
from tailrace_envs.game import Answer, TextGame
from tailrace_envs.published.config import VerifiersConfig
from tailrace_envs.published.verifiers_rollout import FinishedRollout, Rollout


class LoadedEnv:
    """Environment with its rows, shared by the instances of a process."""

    def __init__(self, env: Any, rows: Any) -> None:
        self.env = env
        self.rows = rows

    def row(self, seed: int) -> dict[str, Any]:
        """Row of a seed. As many consecutive seeds as rows give each row once."""
        return dict(self.rows[seed % len(self.rows)])


class VerifiersText(TextGame):
    """Plays an environment of verifiers. Options are the keys of `VerifiersConfig`."""

    waits = True

    def __init__(self, **options: Any) -> None:
        self.config = config = decode_config(options, VerifiersConfig, "env_config")
        super().__init__(config.max_turns)
        self._loaded = load(config.env_id, msgspec.json.encode(config.env_args), config.split)
        self._rollout: Rollout | None = None
        self._reward = 0.0

    def begin(self, seed: int) -> str:
        """See `TextGame`."""
        self.close()
        self._reward = 0.0
        self._rollout = Rollout(self._loaded.env, self._loaded.row(seed))
        asked = self._rollout.begin()
        if isinstance(asked, FinishedRollout):
            raise RuntimeError(f"{self.config.env_id} ended before its first model call")
        return asked

    def answer(self, reply: str) -> Answer:
        """See `TextGame`."""
        assert self._rollout is not None
        asked = self._rollout.reply(reply)
        if not isinstance(asked, FinishedRollout):
            return Answer(asked, 0.0)
        self._reward = asked.reward
        return Answer(asked.text, asked.reward, is_over=True, numbers=asked.metrics)

    def success(self) -> float:
        """See `TextGame`."""
        return float(self._reward >= self.config.success_reward)

    def close(self) -> None:
        """Cancels a running rollout."""
        if self._rollout is not None:
            self._rollout.cancel()
            self._rollout = None


@lru_cache(maxsize=16)
def load(env_id: str, env_args: bytes, split: str) -> LoadedEnv:
    """Loads an environment once per process; `ConfigError` if it cannot be played here."""
    make = _maker(env_id)
    try:
        with foreign_code(f"making {env_id!r} of verifiers"):
            env = make(**msgspec.json.decode(env_args))
            # `get_eval_dataset` returns training rows if there are no others.
            rows = env.get_dataset() if split == "train" else env.build_eval_dataset()
    except ForeignCodeError as error:
        raise ConfigError(
            f"env_id {env_id!r}: {error.error}: install it (`prime env install` or pip), or correct "
            "env_id and env_args"
        ) from error
    if rows is None:
        raise ConfigError(
            f"env_id {env_id!r} has no data set for evaluation, which split 'held_out' plays: ask for "
            "one by its env_args if it can make one, or evaluate on training rows with split: train"
        )
    if not len(rows):
        raise ConfigError(f"env_id {env_id!r} has no rows for split {split!r}")
    if getattr(env, "tool_defs", None):
        raise ConfigError(
            f"env_id {env_id!r} offers tools to the model: play it by a workflow through the gateway "
            "(docs/workflows.md, Environments of verifiers)"
        )
    return LoadedEnv(env, rows)


def _maker(env_id: str) -> Callable[..., Any]:
    """Returns the function that makes the environment from its arguments."""
    if ":" in env_id:
        return load_object(env_id, "env_id")
    return partial(verifiers.load_environment, env_id)
