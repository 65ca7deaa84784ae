"""Environments of the package verifiers, unchanged: `env_type: verifiers`.

An environment of verifiers calls the model, ours is called: its rollout runs as a coroutine on an event
loop of its own and waits, at each model call, for the next reply. What the model reads are the messages
that the call adds, joined; the score of its rubric is the reward of the last step. Such an environment
may only append to the conversation, and offers no tools: for the others run it as a workflow, through
the gateway.
"""

from __future__ import annotations

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
from tailrace_envs.published.verifiers_rollout import Ended, Rollout


class Loaded:
    """An environment and its rows, shared by the instances of a process."""

    def __init__(self, env: Any, rows: Any) -> None:
        self.env = env
        self.rows = rows

    def row(self, seed: int) -> dict[str, Any]:
        """Seeds walk through the rows, so as many consecutive seeds as rows give each row once."""
        return dict(self.rows[seed % len(self.rows)])


class VerifiersText(TextGame):
    """Options are the keys of `VerifiersConfig`."""

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
        said = self._rollout.begin()
        if isinstance(said, Ended):
            raise RuntimeError(f"{self.config.env_id} ended before it asked the model anything")
        return said

    def answer(self, reply: str) -> Answer:
        """See `TextGame`."""
        assert self._rollout is not None
        said = self._rollout.reply(reply)
        if not isinstance(said, Ended):
            return Answer(said, 0.0)
        self._reward = said.reward
        return Answer(said.text, said.reward, is_over=True, numbers=said.metrics)

    def success(self) -> float:
        """See `TextGame`."""
        return float(self._reward >= self.config.success_reward)

    def close(self) -> None:
        """Leave a rollout that is under way."""
        if self._rollout is not None:
            self._rollout.cancel()
            self._rollout = None


@lru_cache(maxsize=16)
def load(env_id: str, env_args: bytes, split: str) -> Loaded:
    """An environment, loaded once per process; `ConfigError` if it cannot be played here."""
    make = _maker(env_id)
    try:
        with foreign_code(f"making {env_id!r} of verifiers"):
            env = make(**msgspec.json.decode(env_args))
            # `get_eval_dataset` would give training rows for evaluation where it has no others.
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
    return Loaded(env, rows)


def _maker(env_id: str) -> Callable[..., Any]:
    """What makes the environment of its arguments."""
    if ":" in env_id:
        return load_object(env_id, "env_id")
    return partial(verifiers.load_environment, env_id)
