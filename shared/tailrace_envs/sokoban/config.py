"""The keys of `env_config` for `env_type: sokoban`."""

from __future__ import annotations

from typing import Literal

from tailrace.config import Config

Split = Literal["train", "held_out", "all"]


class SokobanConfig(Config, frozen=True, kw_only=True):
    """The keys of `env_config` for `env_type: sokoban`."""

    dim_room: tuple[int, int] = (6, 6)
    """Rows and columns, the outer walls included: 4 to 16 each, one of them at least 5, since a push
    takes three cells in a line."""

    num_boxes: int = 1
    """Boxes, and as many goals."""

    wall_share: float = 0.15
    """Share of the inner cells that are walls, 0 to 0.5; the floor always hangs together."""

    max_pulls: int = 10
    """Levels are made by playing backwards from the solved board: pulls in that play, at most. More
    make harder levels."""

    split: Split = "train"
    """Which levels seeds choose from: `train`, `held_out` (never a train level) or `all`."""

    max_turns: int = 30
    """Replies after which the episode is truncated. Every level has a solution within them."""

    penalty_for_step: float = -0.1
    """Reward of every turn, besides the others."""

    reward_box_on_target: float = 1.0
    """Reward of pushing a box onto a goal."""

    penalty_box_off_target: float = -1.0
    """Reward of pushing a box off a goal."""

    reward_finished: float = 10.0
    """Reward when all boxes are on goals."""

    invalid_action_penalty: float = 0.0
    """Subtracted from the reward of a turn whose reply has no direction word."""

    instructions: bool = False
    """Begin the first observation with the rules, for models that do not know the game."""

    def __post_init__(self) -> None:
        if not all(4 <= length <= 16 for length in self.dim_room):
            raise ValueError("dim_room must be two numbers of 4 to 16")
        if max(self.dim_room) < 5:
            raise ValueError("dim_room 4 by 4 leaves no room to push a box: the least is 4 by 5")
        if not 0.0 <= self.wall_share <= 0.5:
            raise ValueError("wall_share must be 0 to 0.5")
        if not 1 <= self.num_boxes <= self.num_inner_cells // 4:
            raise ValueError("num_boxes must be 1 to a quarter of the inner cells of dim_room")
        if not 1 <= self.max_pulls <= 500:
            raise ValueError("max_pulls must be 1 to 500")
        if self.max_turns < 1:
            raise ValueError("max_turns must be at least 1")
        if self.invalid_action_penalty < 0:
            raise ValueError("invalid_action_penalty must not be negative: it is subtracted")

    @property
    def num_inner_cells(self) -> int:
        """Cells inside the outer walls."""
        return (self.dim_room[0] - 2) * (self.dim_room[1] - 2)
