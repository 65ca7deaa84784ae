"""Base class of text games: counts turns, limits them, and ends episodes.

Invariants: a game is a pure function of its configuration, the seed of `reset` and the replies. After
the last step only `reset` is allowed. `success` is in the last `info` only.
"""

import string
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import gymnasium
import msgspec

TEXT_SPACE = gymnasium.spaces.Text(1 << 16, min_length=0, charset=string.printable)


def cells_around(lines: Sequence[str], row: int, column: int, radius: int, outside: str) -> list[str]:
    """Cells of a text map within `radius` of a cell, diagonal ones included; `outside` beyond it."""
    side = outside * radius
    rows = [outside * len(lines[0])] * radius
    framed = [f"{side}{line}{side}" for line in (*rows, *lines, *rows)]
    width = 2 * radius + 1
    return [line[column : column + width] for line in framed[row : row + width]]


class Answer(msgspec.Struct, frozen=True):
    """Answer of a game to a reply. `is_over`: the rules of the game end the episode, not the limit."""

    observation: str
    reward: float
    is_over: bool = False
    is_invalid: bool = False
    numbers: dict[str, float] = {}


class TextGame(gymnasium.Env[str, str]):
    """Turns of a game. A subclass defines `begin`, `answer` and `success`, optionally `instructions`
    and `render`."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012 gymnasium's declaration
    render_mode = "ansi"
    waits = False  # default of the experiment's `in_threads`: steps run in threads
    observation_space = TEXT_SPACE
    action_space = TEXT_SPACE

    def __init__(self, max_turns: int) -> None:
        self._max_turns = max_turns
        self._num_turns = 0
        self._num_invalid = 0
        self._reply, self._shown = "", ""
        self.is_done = True

    @abstractmethod
    def begin(self, seed: int) -> str:
        """Sets up the episode of `seed`; returns the first observation."""

    @abstractmethod
    def answer(self, reply: str) -> Answer:
        """Plays a reply."""

    @abstractmethod
    def success(self) -> float:
        """Degree to which the task is solved now, 0 to 1."""

    def instructions(self) -> str | None:
        """Part of the first observation that stays in the prompt for the whole episode, whatever
        `history_turns` is; None: all of it."""
        return None

    def final_info(self) -> dict[str, Any]:
        """Entries of the last `info`: `success` and metrics of the episode."""
        return {"success": self.success(), "num_invalid_actions": self._num_invalid}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Starts an episode; without a seed the environment's own generator draws one."""
        super().reset(seed=seed)
        self._shown = self.begin(int(self.np_random.integers(2**31)) if seed is None else seed)
        self._num_turns = self._num_invalid = 0
        self.is_done = False
        instructions = self.instructions()
        return self._shown, {} if instructions is None else {"instructions": instructions}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        """Plays one reply of the model; raises `gymnasium.error.ResetNeeded` after the last one."""
        if self.is_done:
            raise gymnasium.error.ResetNeeded("the episode is over: call reset before step")
        answer = self.answer(action)
        self._num_turns += 1
        self._reply, self._shown = action, answer.observation
        self._num_invalid += answer.is_invalid
        is_truncated = not answer.is_over and self._num_turns >= self._max_turns
        self.is_done = answer.is_over or is_truncated
        info: dict[str, Any] = {"invalid_action": answer.is_invalid, **answer.numbers}
        if self.is_done:
            info |= self.final_info()
        return answer.observation, answer.reward, answer.is_over, is_truncated, info

    def render(self) -> Any:
        """Renders the newest reply and its answer as text; a subclass may return a picture."""
        self.require_reset()
        return f"> {self._reply}\n\n{self._shown}" if self._num_turns else self._shown

    @property
    def num_turns(self) -> int:
        """Number of replies in this episode."""
        return self._num_turns

    def require_reset(self) -> None:
        """Raises `ResetNeeded` before the first `reset`."""
        if self.is_done and not self._num_turns:
            raise gymnasium.error.ResetNeeded("call reset before render")
