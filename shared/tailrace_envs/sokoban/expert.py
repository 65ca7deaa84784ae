"""Demonstrations of Sokoban: shortest solutions, mixed with random moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache, partial
from typing import Any

from tailrace_envs.demonstrations import (
    ChatRenderer,
    DemonstrationRow,
    play_demonstrations,
    train_options,
)
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


def demonstrations(
    renderer: ChatRenderer, *, seed: int, num_episodes: int, random_moves: float = 0.3, **options: Any
) -> Iterator[DemonstrationRow]:
    """Yields `num_episodes` rows of token ids and loss mask, both [T]; the mask is 1 on replies.

    `random_moves`: share of moves drawn uniformly from the four words. `options`: keys of
    `SokobanConfig`; the split is always train.
    """
    options = train_options(options, random_moves)
    yield from play_demonstrations(
        partial(SokobanText, **options),
        SokobanExpert(),
        renderer,
        seed=seed,
        num_episodes=num_episodes,
        random_moves=random_moves,
    )
