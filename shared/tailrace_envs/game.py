"""What the text games here have in common: turns, their limit, and when an episode is over.

Invariants: a game is a pure function of its configuration, the seed of `reset` and the replies; after
the last step only `reset` is allowed; `success` stands in the last `info` and nowhere else.
"""

from __future__ import annotations

import string
from abc import abstractmethod
from typing import Any, NamedTuple

import gymnasium

TEXT_SPACE = gymnasium.spaces.Text(1 << 16, min_length=0, charset=string.printable)


class Answer(NamedTuple):
    """A game's answer to a reply. `is_over`: by the rules of the game, not for want of turns."""

    observation: str
    reward: float
    is_over: bool = False
    is_invalid: bool = False
    numbers: dict[str, float] = {}  # noqa: RUF012  never changed


class TextGame(gymnasium.Env[str, str]):
    """Turns of a game. A subclass defines `begin`, `answer`, `success` and perhaps `instructions` and
    `render`."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012 gymnasium's declaration
    render_mode = "ansi"
    waits = False  # whether steps belong into threads, unless the experiment says it
    observation_space = TEXT_SPACE
    action_space = TEXT_SPACE

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._num_turns = 0
        self._num_invalid = 0
        self._shown = ""
        self.is_done = True

    @abstractmethod
    def begin(self, seed: int) -> str:
        """Set up the episode that `seed` fixes; the first observation."""

    @abstractmethod
    def answer(self, reply: str) -> Answer:
        """Play a reply."""

    @abstractmethod
    def success(self) -> float:
        """How well the task is solved now, 0 to 1."""

    def instructions(self) -> str | None:
        """What of the first observation the model must go on seeing in this episode, however short its
        `history_turns`; None: all of it."""
        return None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """The first observation. Without a seed the environment's own generator draws one."""
        super().reset(seed=seed)
        self._shown = self.begin(int(self.np_random.integers(2**31)) if seed is None else seed)
        self._num_turns = self._num_invalid = 0
        self.is_done = False
        instructions = self.instructions()
        return self._shown, {} if instructions is None else {"instructions": instructions}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Play one reply of the model; raises `gymnasium.error.ResetNeeded` after the last one."""
        if self.is_done:
            raise gymnasium.error.ResetNeeded("the episode is over: call reset before step")
        answer = self.answer(action)
        self._num_turns += 1
        self._shown = f"> {action}\n\n{answer.observation}"
        self._num_invalid += answer.is_invalid
        is_truncated = not answer.is_over and self._num_turns >= self._max_turns
        self.is_done = answer.is_over or is_truncated
        info: dict[str, Any] = {"invalid_action": answer.is_invalid, **answer.numbers}
        if self.is_done:
            info["success"] = self.success()
            info["num_invalid_actions"] = self._num_invalid
        return answer.observation, answer.reward, answer.is_over, is_truncated, info

    def render(self) -> Any:
        """The newest reply and what came of it, as text; games that draw give a picture instead."""
        self.require_reset()
        return self._shown

    def require_reset(self) -> None:
        """Raise `ResetNeeded` before the first `reset`."""
        if self.is_done and not self._num_turns:
            raise gymnasium.error.ResetNeeded("call reset before render")
