"""Sokoban as a conversation: the board as letters, a line per row, answered by a direction word.

The reply's first direction word is the move; it walks, or pushes the box ahead. Rewards are those of
gym-sokoban: every turn costs a little, a box onto a goal pays, a box off a goal costs, all boxes on
goals pay and end the episode. A reply without a direction word is answered by a note and the same
board.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.config import decode_config
from tailrace_envs.game import Answer, TextGame
from tailrace_envs.sokoban.board import DIRECTIONS, Board
from tailrace_envs.sokoban.config import SokobanConfig
from tailrace_envs.sokoban.levels import level_for_seed
from tailrace_envs.sokoban.picture import draw

INVALID_NOTE = "Invalid action.\n"
RULES = (
    "You are P in a warehouse of walls (#) and floor (_). Push every box (X) onto a goal (O): walk "
    "against it from the other side. * is a box on a goal, S is you on a goal. Boxes cannot be pulled. "
    "Answer every board with one word: Up, Down, Left or Right.\n"
)

_ACTION = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)


class SokobanText(TextGame):
    """One episode at a time on a level that the seed of `reset` chooses from the split.

    `info["success"]` is 1.0 if every box stands on a goal at the end. Options are the keys of
    `SokobanConfig`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 gymnasium's declaration
    render_mode = "rgb_array"

    def __init__(self, **options: Any) -> None:
        self.config = decode_config(options, SokobanConfig, "env_config")
        super().__init__(self.config.max_turns)
        self.board, self.position, _ = level_for_seed(self.config, 0)  # an empty split fails here

    def begin(self, seed: int) -> str:
        """See `TextGame`."""
        self.board, self.position, _ = level_for_seed(self.config, seed)
        return self.instructions() + self.board.text(self.position)

    def instructions(self) -> str:
        """See `TextGame`."""
        return RULES if self.config.instructions else ""

    def answer(self, reply: str) -> Answer:
        """See `TextGame`."""
        config, board = self.config, self.board
        step = parse_action(board, reply)
        if step is None:
            reward = config.penalty_for_step - config.invalid_action_penalty
            return Answer(INVALID_NOTE + board.text(self.position), reward, is_invalid=True)
        before = board.num_on_goals(self.position)
        self.position = board.moved(self.position, step)
        gained = board.num_on_goals(self.position) - before
        reward = config.penalty_for_step
        reward += config.reward_box_on_target * (gained > 0)
        reward += config.penalty_box_off_target * (gained < 0)
        is_solved = board.is_solved(self.position)
        reward += config.reward_finished * is_solved
        return Answer(board.text(self.position), reward, is_solved)

    def success(self) -> float:
        """See `TextGame`."""
        return float(self.board.is_solved(self.position))

    def render(self) -> NDArray[np.uint8]:
        """A picture of the board, [height, width, 3]."""
        self.require_reset()
        return draw(self.board, self.position)


def parse_action(board: Board, reply: str) -> int | None:
    """The step of the first direction word in `reply`, in any case; None without one."""
    found = _ACTION.search(reply)
    return board.steps[DIRECTIONS.index(found.group(1).capitalize())] if found else None
