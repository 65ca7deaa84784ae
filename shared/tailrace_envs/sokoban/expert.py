"""Players of Sokoban: demonstrations of legal moves, and baselines.

The demonstrations teach to read the board and to answer with a direction word. Their moves are
uniformly random among the steps and pushes that are possible, but for 5% (`random_moves`), which are
any word.
"""

from collections.abc import Sequence
from functools import lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace_envs.baselines import Player, one_of, random_player
from tailrace_envs.demonstrations import demonstrations_of
from tailrace_envs.sokoban.board import DIRECTIONS, Board, Position
from tailrace_envs.sokoban.config import SokobanConfig
from tailrace_envs.sokoban.environment import SokobanText
from tailrace_envs.sokoban.levels import Level, level_for_seed
from tailrace_envs.sokoban.solver import push_distances, solve

NUM_KNOWN_LEVELS = 1024  # of the train split, for the nearest level


class SokobanNovice:
    """Novice that makes possible moves."""

    def sensible_replies(self, env: SokobanText) -> Sequence[str]:
        """Directions into which the player can walk or push."""
        return legal_moves(env.board, env.position)

    def any_replies(self, env: SokobanText) -> Sequence[str]:
        """The four directions."""
        return DIRECTIONS


_NOVICE = SokobanNovice()
demonstrations = demonstrations_of(SokobanText, _NOVICE, random_moves=0.05)


def legal_moves(board: Board, position: Position) -> tuple[str, ...]:
    """Directions into which the player can walk or push."""
    steps = zip(DIRECTIONS, board.steps, strict=True)
    return tuple(word for word, step in steps if board.moved(position, step) != position)


def _push_nearer(env: SokobanText, random: np.random.Generator) -> str:
    """Pushes a box nearer to a goal if one move does that; else any legal move."""
    board, position = env.board, env.position
    pushes = push_distances(board)

    def left(after: Position) -> int:
        return sum(len(pushes) if pushes[box] < 0 else pushes[box] for box in after.boxes)

    steps = zip(DIRECTIONS, board.steps, strict=True)
    now = left(position)
    nearer = [word for word, step in steps if left(board.moved(position, step)) < now]
    return one_of(nearer or legal_moves(board, position) or DIRECTIONS, random)


def _nearest_train_level(env: SokobanText, random: np.random.Generator) -> str:
    """Plays a shortest solution of the train level whose board differs in the fewest cells."""
    board, start, _ = env.level
    moves = _answer_of_nearest(env.config, board, start)
    return moves[min(env.num_turns, len(moves) - 1)]


@lru_cache(maxsize=4096)
def _answer_of_nearest(config: SokobanConfig, board: Board, start: Position) -> tuple[str, ...]:
    levels, cells = _known_levels(msgspec.structs.replace(config, split="train"))
    nearest = levels[int((cells != _cells_of(board, start)).sum(1).argmin())]
    return solve(nearest.board, nearest.start) or DIRECTIONS


@lru_cache(maxsize=4)
def _known_levels(config: SokobanConfig) -> tuple[list[Level], NDArray[np.uint8]]:
    """Train levels with their boards' letters, [n, cells]."""
    levels = [level_for_seed(config, seed) for seed in range(NUM_KNOWN_LEVELS)]
    return levels, np.stack([_cells_of(level.board, level.start) for level in levels])


def _cells_of(board: Board, position: Position) -> NDArray[np.uint8]:
    return np.frombuffer(board.text(position).encode(), np.uint8)


def baselines() -> dict[str, Player[SokobanText]]:
    """Returns simple players, by name."""
    return {
        "random": random_player(_NOVICE.any_replies),
        "random legal": random_player(lambda env: _NOVICE.sensible_replies(env) or DIRECTIONS),
        "push nearer to a goal": _push_nearer,
        "answer of the nearest train level": _nearest_train_level,
    }
