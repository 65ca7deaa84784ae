"""Players of FrozenLake: demonstrations of safe moves, baselines, and shortest paths.

The demonstrations teach to read the grid and to answer with a direction word. They do not teach to win:
their moves are uniformly random among those that lead neither into a hole nor into a wall, but for 5%
(`random_moves`), which are any word.
"""

from collections.abc import Sequence
from functools import cache, lru_cache

import numpy as np
from numpy.typing import NDArray

from tailrace_envs.baselines import Player, one_of, random_player
from tailrace_envs.demonstrations import demonstrations_of
from tailrace_envs.frozen_lake import ACTIONS, FrozenLakeText, lake_on
from tailrace_envs.frozen_lake_maps import FrozenLakeMap, holes_of, maps_of


class FrozenLakeNovice:
    """Novice that avoids holes and walls."""

    def sensible_replies(self, env: FrozenLakeText) -> Sequence[str]:
        """Words that lead onto another cell that is no hole."""
        return safe_moves(env.lake_map, env.position)

    def any_replies(self, env: FrozenLakeText) -> Sequence[str]:
        """The four direction words."""
        return tuple(ACTIONS)


_NOVICE = FrozenLakeNovice()
demonstrations = demonstrations_of(FrozenLakeText, _NOVICE, random_moves=0.05)


def safe_moves(lake_map: FrozenLakeMap, position: int) -> tuple[str, ...]:
    """Words that lead from `position` onto another cell that is no hole; the ice is not slippery."""
    cells = "".join(lake_map)
    return tuple(
        word
        for word, after in zip(ACTIONS, _next_cells(lake_map)[position], strict=True)
        if after != position and cells[after] != "H"
    )


def best_moves(lake_map: FrozenLakeMap, position: int) -> tuple[str, ...]:
    """Words that begin a shortest path from `position` to the goal on ice that is not slippery."""
    distances = _distances_to_goal(lake_map)
    nearer = distances[position] - 1
    after = zip(ACTIONS, _next_cells(lake_map)[position], strict=True)
    return tuple(word for word, cell in after if distances[cell] == nearer)


def shortest_path(lake_map: FrozenLakeMap) -> tuple[str, ...]:
    """Words of a shortest path from the start to the goal."""
    words: list[str] = []
    position, goal = 0, len(_next_cells(lake_map)) - 1
    while position != goal:
        words.append(best_moves(lake_map, position)[0])
        position = _next_cells(lake_map)[position][ACTIONS[words[-1]]]
    return tuple(words)


@lru_cache(maxsize=16_384)
def _next_cells(lake_map: FrozenLakeMap) -> list[list[int]]:
    """For each cell, the cells that gymnasium's four actions lead to."""
    lake = lake_on(lake_map, is_slippery=False)
    return [[lake.P[cell][move][0][1] for move in range(len(ACTIONS))] for cell in lake.P]


@lru_cache(maxsize=16_384)
def _distances_to_goal(lake_map: FrozenLakeMap) -> list[float]:
    """Number of moves from each cell to the last one; infinite without a path."""
    next_cells = _next_cells(lake_map)
    distances = [float("inf")] * len(next_cells)
    frontier = [len(next_cells) - 1]
    distances[-1] = 0.0
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


def _avoid_next_hole(env: FrozenLakeText, random: np.random.Generator) -> str:
    """Plays right or down, or another safe move if both are unsafe."""
    safe = safe_moves(env.lake_map, env.position)
    return one_of([word for word in safe if word in ("Right", "Down")] or safe, random)


def _nearest_train_map(env: FrozenLakeText, random: np.random.Generator) -> str:
    """Plays the shortest path of the train map that differs from this one in the fewest cells."""
    config = env.config
    maps, holes = _train_holes(config.size, config.p)
    nearest = maps[int((holes != holes_of(env.lake_map).ravel()).sum(1).argmin())]
    path = shortest_path(nearest)
    return path[min(env.num_turns, len(path) - 1)]


@cache
def _train_holes(size: int, p: float) -> tuple[Sequence[FrozenLakeMap], NDArray[np.bool_]]:
    """Train maps with their holes, [n, size * size]."""
    maps = maps_of(size, p, "train")
    return maps, np.stack([holes_of(lake_map).ravel() for lake_map in maps])


def baselines() -> dict[str, Player[FrozenLakeText]]:
    """Returns simple players, by name."""
    return {
        "random": random_player(_NOVICE.any_replies),
        "safe random": random_player(_NOVICE.sensible_replies),
        "avoid the next hole": _avoid_next_hole,
        "answer of the nearest train map": _nearest_train_map,
    }
