"""Demonstrations of FrozenLake for a warm start: shortest paths, mixed with random moves."""

from collections.abc import Sequence
from functools import lru_cache

from tailrace_envs.demonstrations import demonstrations_of
from tailrace_envs.frozen_lake import ACTIONS, FrozenLakeText, lake_on
from tailrace_envs.frozen_lake_maps import FrozenLakeMap


class FrozenLakeExpert:
    """Expert that walks shortest paths."""

    def best_replies(self, env: FrozenLakeText) -> Sequence[str]:
        """Words that begin a shortest path."""
        return best_moves(env.lake_map, env.position)

    def any_replies(self, env: FrozenLakeText) -> Sequence[str]:
        """The four direction words."""
        return tuple(ACTIONS)


demonstrations = demonstrations_of(FrozenLakeText, FrozenLakeExpert(), random_moves=0.5)


def best_moves(lake_map: FrozenLakeMap, position: int) -> tuple[str, ...]:
    """Words that begin a shortest path from `position` to the goal on ice that is not slippery."""
    return _best_moves(lake_map)[position]


@lru_cache(maxsize=4096)
def _best_moves(lake_map: FrozenLakeMap) -> tuple[tuple[str, ...], ...]:
    """For each cell, the words that lead one step nearer to the goal."""
    lake = lake_on(lake_map, is_slippery=False)
    next_cells = [[lake.P[cell][move][0][1] for move in ACTIONS.values()] for cell in lake.P]
    distances = _distances_to_goal(next_cells)
    return tuple(
        tuple(
            word
            for word, next_cell in zip(ACTIONS, cells, strict=True)
            if distances[next_cell] == distances[cell] - 1
        )
        for cell, cells in enumerate(next_cells)
    )


def _distances_to_goal(next_cells: list[list[int]]) -> list[float]:
    """Number of moves from each cell to the last one; infinite without a path."""
    goal = len(next_cells) - 1
    distances = [float("inf")] * len(next_cells)
    distances[goal] = 0.0
    frontier = [goal]
    while frontier:
        reached = {
            cell
            for cell, cells in enumerate(next_cells)
            if distances[cell] == float("inf") and not set(cells).isdisjoint(frontier)
        }
        for cell in reached:
            distances[cell] = min(distances[near] for near in next_cells[cell]) + 1
        frontier = list(reached)
    return distances
