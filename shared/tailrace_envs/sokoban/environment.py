"""Sokoban as a conversation: the model reads the board as letters and answers with a direction word.

The first direction word of a reply is the move: a step, or a push of the box ahead. Rewards are those
of gym-sokoban: a small penalty for every turn, a reward for a box onto a goal, a penalty for a box off
a goal, and a reward at the end, when all boxes are on goals. A reply without a direction word gets a
note and the same board.
"""

import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrace.config import decode_config
from tailrace_envs.game import Answer, TextGame, cells_around
from tailrace_envs.sokoban.board import DIRECTIONS, Board, Position
from tailrace_envs.sokoban.config import SokobanConfig
from tailrace_envs.sokoban.levels import level_for_seed

INVALID_NOTE = "Invalid action.\n"
RULES = (
    "You are P in a warehouse of walls (#) and floor (_). Push every box (X) onto a goal (O): walk "
    "against it from the other side. * is a box on a goal, S is you on a goal. Boxes cannot be pulled. "
    "Answer every board with one word: Up, Down, Left or Right.\n"
)

_ACTION = re.compile(r"\b(up|down|left|right)\b", re.IGNORECASE)

TILE = 32  # pixels

_COLOURS = {
    "wall": (92, 84, 80),
    "joint": (70, 63, 60),
    "floor": (236, 226, 206),
    "goal": (206, 62, 54),
    "box": (176, 118, 58),
    "edge": (112, 72, 34),
    "done": (86, 150, 74),
    "player": (42, 92, 168),
}


class SokobanText(TextGame):
    """Plays one episode at a time, on a level that the seed of `reset` selects from the split.

    `info["success"]` is 1.0 if every box is on a goal at the end. Options are the keys of
    `SokobanConfig`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 gymnasium's declaration
    render_mode = "rgb_array"

    def __init__(self, **options: Any) -> None:
        self.config = decode_config(options, SokobanConfig, "env_config")
        super().__init__(self.config.max_turns)
        self.level = level_for_seed(self.config, 0)  # an empty split fails here
        self.board, self.position, _ = self.level

    def begin(self, seed: int) -> str:
        """See `TextGame`."""
        self.level = level_for_seed(self.config, seed)
        self.board, self.position, _ = self.level
        return self.instructions() + self._text()

    def instructions(self) -> str:
        """See `TextGame`."""
        return RULES if self.config.instructions else ""

    def answer(self, reply: str) -> Answer:
        """See `TextGame`."""
        config, board = self.config, self.board
        step = parse_action(board, reply)
        if step is None:
            reward = config.penalty_for_step - config.invalid_action_penalty
            return Answer(INVALID_NOTE + self._text(), reward, is_invalid=True)
        before = board.num_on_goals(self.position)
        self.position = board.moved(self.position, step)
        gained = board.num_on_goals(self.position) - before
        reward = config.penalty_for_step
        reward += config.reward_box_on_target * (gained > 0)
        reward += config.penalty_box_off_target * (gained < 0)
        is_solved = board.is_solved(self.position)
        reward += config.reward_finished * is_solved
        return Answer(self._text(), reward, is_solved)

    def success(self) -> float:
        """See `TextGame`."""
        return float(self.board.is_solved(self.position))

    def _text(self) -> str:
        """Board or view, and the line of offsets."""
        board, radius = self.board, self.config.view_radius
        text = board.text(self.position)
        if radius:
            place = board.place(self.position.player)
            text = "\n".join(cells_around(text.split(), *place, radius, "#")) + "\n"
        return text + (board.offsets(self.position) if self.config.offsets else "")

    def render(self) -> NDArray[np.uint8]:
        """Draws the board, [height, width, 3]."""
        self.require_reset()
        return draw(self.board, self.position)


def parse_action(board: Board, reply: str) -> int | None:
    """Returns the step of the first direction word in `reply`, in any case; None without one."""
    found = _ACTION.search(reply)
    return board.steps[DIRECTIONS.index(found.group(1).capitalize())] if found else None


def draw(board: Board, position: Position) -> NDArray[np.uint8]:
    """Draws a position with numpy alone, [rows * TILE, columns * TILE, 3]."""
    letters = board.text(position).split()
    rows = [np.concatenate([_tile(letter) for letter in row], axis=1) for row in letters]
    return np.concatenate(rows, axis=0)


def _tile(letter: str) -> NDArray[np.uint8]:
    tile = np.full((TILE, TILE, 3), _COLOURS["wall" if letter == "#" else "floor"], np.uint8)
    if letter == "#":
        tile[:: TILE // 2], tile[:, :: TILE // 2] = _COLOURS["joint"], _COLOURS["joint"]
    if letter in "OS*":
        _fill(tile, TILE // 3, "goal")
    if letter in "X*":
        _fill(tile, TILE // 8, "edge")
        _fill(tile, TILE // 5, "done" if letter == "*" else "box")
    if letter in "PS":
        rows, columns = np.ogrid[:TILE, :TILE]
        centre = (TILE - 1) / 2
        disc = (rows - centre) ** 2 + (columns - centre) ** 2 <= (TILE * 0.32) ** 2
        tile[disc] = _COLOURS["player"]
    return tile


def _fill(tile: NDArray[np.uint8], margin: int, colour: str) -> None:
    tile[margin : TILE - margin, margin : TILE - margin] = _COLOURS[colour]
