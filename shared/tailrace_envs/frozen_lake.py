"""FrozenLake as a conversation: gymnasium's own environment, with the grid as text.

Every observation is the whole grid, one line per row, with `P` at the agent's cell; or with
`view_radius` the cells around the agent, `P` in the middle and `#` outside of the lake. The first
direction word of a reply is the move. A reply without one gets a note and the same grid; it costs
`invalid_action_penalty` and a turn. Moves and rewards are gymnasium's.

A process has thousands of instances. Instances on the same map share the parts that depend only on the
map; each one owns its position, its random generator and its turn count.
"""

import copy
import re
import string
from functools import lru_cache
from typing import Any

import gymnasium
import numpy as np
from gymnasium.envs.toy_text.frozen_lake import DOWN, LEFT, RIGHT, UP, FrozenLakeEnv
from numpy.typing import NDArray

from tailrace.config import Config, decode_config
from tailrace_envs.frozen_lake_maps import FrozenLakeMap, map_for_seed, maps_of
from tailrace_envs.game import Answer, TextGame, cells_around
from tailrace_envs.rewards import check_rewards
from tailrace_envs.splits import Split

ACTIONS: dict[str, int] = {"Left": LEFT, "Down": DOWN, "Right": RIGHT, "Up": UP}
INVALID_NOTE = "Invalid action.\n"
RULES = (
    "You are P on a frozen lake. F is ice, S the start, H a hole, G the goal. Reach G, avoid H. "
    "Answer every grid with one word: Left, Down, Right or Up.\n"
)
OUTSIDE = "#"

_ACTION = re.compile(r"\b(left|down|right|up)\b", re.IGNORECASE)

TILE = 64  # pixels

_COLOURS = {"F": (214, 235, 250), "S": (176, 213, 240), "H": (38, 70, 110), "G": (86, 170, 84)}
_EDGE = (180, 200, 230)
_AGENT = (206, 62, 54)


class FrozenLakeConfig(Config, frozen=True, kw_only=True):
    """The keys of `env_config` for `env_type: frozen_lake`."""

    size: int = 4
    """Rows and columns of the grid, 2 to 12."""

    p: float = 0.8
    """Probability that a cell is ice and not a hole, 0.6 to 1."""

    split: Split = "train"
    """Maps that seeds select from: `train`, `held_out` (never a train map) or `all`."""

    max_turns: int = 10
    """Replies after which the episode is truncated."""

    invalid_action_penalty: float = 0.0
    """Penalty that is subtracted from the reward of a reply without a direction word."""

    view_radius: int = 0
    """Cells that the agent sees in each direction, diagonal ones included: 3 shows seven rows of seven
    cells around it. A policy then reads lakes of every size alike. 0: the whole grid."""

    is_slippery: bool = False
    """gymnasium's slippery ice: the agent moves in the chosen direction with probability 1/3 only."""

    instructions: bool = False
    """The first observation begins with the rules, for models that do not know the game."""

    def __post_init__(self) -> None:
        if not 2 <= self.size <= 12:
            raise ValueError("size must be 2 to 12")
        if not 0.6 <= self.p <= 1.0:
            raise ValueError("p must be 0.6 to 1: with fewer ice cells few random maps have a path")
        if self.view_radius < 0:
            raise ValueError("view_radius must not be negative; 0 is the whole grid")
        if self.max_turns < 1:
            raise ValueError("max_turns must be at least 1")
        check_rewards(self)


class FrozenLakeText(TextGame):
    """Plays one episode at a time, on a map that the seed of `reset` selects from the split.

    The reward is 1 on the goal and 0 elsewhere, minus penalties. Every step's `info` has
    `invalid_action`, the last one also `success` (1.0 or 0.0). Options are the keys of
    `FrozenLakeConfig`.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012 gymnasium's declaration
    render_mode = "rgb_array"

    def __init__(self, **options: Any) -> None:
        self.config = decode_config(options, FrozenLakeConfig, "env_config")
        super().__init__(self.config.max_turns)
        maps_of(self.config.size, self.config.p, self.config.split)  # an empty split fails here
        self.observation_space, self.action_space = _spaces(
            max(self.config.size, 2 * self.config.view_radius + 1)
        )
        self._lake: Any = None  # a FrozenLakeEnv, whose methods carry no annotations
        self._map: FrozenLakeMap = ()
        self._text = ""  # of the map without the agent

    def begin(self, seed: int) -> str:
        """See `TextGame`."""
        config = self.config
        self._map = map_for_seed(config.size, config.p, config.split, seed)
        self._text = "\n".join(self._map) + "\n"
        self._lake = copy.copy(lake_on(self._map, config.is_slippery))
        self._lake.np_random = self.np_random  # instead of a second one
        self._lake.reset()
        return self.instructions() + self.grid()

    def instructions(self) -> str:
        """See `TextGame`."""
        return RULES if self.config.instructions else ""

    def answer(self, reply: str) -> Answer:
        """See `TextGame`."""
        move = parse_action(reply)
        if move is None:
            reward = 0.0 - self.config.invalid_action_penalty
            return Answer(INVALID_NOTE + self.grid(), reward, is_invalid=True)
        _, reward, is_over, _, _ = self._lake.step(move)
        return Answer(self.grid(), float(reward), is_over)

    def success(self) -> float:
        """See `TextGame`."""
        row, column = divmod(self.position, self.config.size)
        return float(self._map[row][column] == "G")

    def final_info(self) -> dict[str, Any]:
        """See `TextGame`; only `success`."""
        return {"success": self.success()}

    def grid(self) -> str:
        """Map with the agent, or its part around the agent, one line per row."""
        row, column = divmod(self.position, self.config.size)
        cell = self.position + row  # each row has an end of line
        text = f"{self._text[:cell]}P{self._text[cell + 1 :]}"
        radius = self.config.view_radius
        if not radius:
            return text
        return "\n".join(cells_around(text.splitlines(), row, column, radius, OUTSIDE)) + "\n"

    def render(self) -> NDArray[np.uint8]:
        """Draws the lake with numpy alone, [rows * TILE, columns * TILE, 3]."""
        self.require_reset()
        picture = np.array([[_COLOURS[letter] for letter in row] for row in self._map], dtype=np.uint8)
        picture = picture.repeat(TILE, axis=0).repeat(TILE, axis=1)
        picture[::TILE], picture[:, ::TILE] = _EDGE, _EDGE
        row, column = (TILE * each + TILE // 4 for each in divmod(self.position, self.config.size))
        picture[row : row + TILE // 2, column : column + TILE // 2] = _AGENT
        return picture

    @property
    def lake_map(self) -> FrozenLakeMap:
        """Map of this episode."""
        return self._map

    @property
    def position(self) -> int:
        """Number of the agent's cell, row by row from 0."""
        return int(self._lake.s)


def parse_action(reply: str) -> int | None:
    """Returns gymnasium's number of the first direction word, in any case; None without one."""
    found = _ACTION.search(reply)
    return ACTIONS[found.group(1).capitalize()] if found else None


@lru_cache(maxsize=4096)
def lake_on(lake_map: FrozenLakeMap, is_slippery: bool) -> FrozenLakeEnv:
    """Builds the environment of a map, for shallow copies: 130 us to build, 2 us to copy."""
    return FrozenLakeEnv(desc=list(lake_map), is_slippery=is_slippery)


@lru_cache(maxsize=16)
def _spaces(width: int) -> tuple[gymnasium.spaces.Text, gymnasium.spaces.Text]:
    """Observation and action space of grids with so many rows and columns."""
    longest = len(RULES) + len(INVALID_NOTE) + width * (width + 1)
    observation = gymnasium.spaces.Text(longest, charset=string.printable)
    return observation, gymnasium.spaces.Text(4096, min_length=0, charset=string.printable)
