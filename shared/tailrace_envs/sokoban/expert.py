"""Demonstrations of Sokoban: shortest solutions, mixed with random moves."""

from collections.abc import Sequence
from functools import lru_cache

from tailrace_envs.demonstrations import demonstrations_of
from tailrace_envs.sokoban.board import DIRECTIONS, Board, Position
from tailrace_envs.sokoban.environment import SokobanText
from tailrace_envs.sokoban.solver import solve


class SokobanExpert:
    """Expert that follows a shortest solution from the current position."""

    def best_replies(self, env: SokobanText) -> Sequence[str]:
        """First move of a shortest solution; empty if the position cannot be solved any more."""
        return next_moves(env.board, env.position)[:1]

    def any_replies(self, env: SokobanText) -> Sequence[str]:
        """The four directions."""
        return DIRECTIONS


@lru_cache(maxsize=65_536)
def next_moves(board: Board, position: Position) -> tuple[str, ...]:
    """Moves of a shortest solution; empty if there is none."""
    return solve(board, position) or ()


demonstrations = demonstrations_of(SokobanText, SokobanExpert(), random_moves=0.3)
