"""Demonstrations for a warm start: shortest-path play with a share of random moves.

Rows are whole episodes in the very tokens that agents would produce, because the same renderer writes
them. Maps come from the train split only. The random moves keep the warm-started policy
uncertain, which leaves reinforcement learning something to do.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tailrace.envs.frozen_lake import ACTIONS, FrozenLakeText, lake_on
from tailrace.envs.frozen_lake_maps import FrozenLakeMap


class ChatRenderer(Protocol):
    """What is needed of `tailrace.chat.Renderer`."""

    def observation_ids(self, text: str, first: bool) -> NDArray[np.int32]:
        """Ids inserted before the model's turn."""
        ...

    def reply_ids(self, text: str) -> NDArray[np.int32]:
        """Ids as the model would sample them, the end of its turn included."""
        ...


def demonstrations(
    renderer: ChatRenderer, *, seed: int, num_episodes: int, random_moves: float = 0.5, **options: Any
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield `num_episodes` rows of token ids and loss mask, both [T]; the mask is 1 on replies.

    `random_moves` is the share of moves drawn uniformly from the four words; `options` are the
    environment's own (`FrozenLakeConfig`), always played on the train split.
    """
    if not 0.0 <= random_moves <= 1.0:
        raise ValueError("random_moves must be 0 to 1")
    if options.setdefault("split", "train") != "train":
        raise ValueError("demonstrations come from the train split: leave out `split`")
    env = FrozenLakeText(**options)
    random = np.random.default_rng(seed)
    for _ in range(num_episodes):
        yield _episode(renderer, env, random, random_moves)


def _episode(
    renderer: ChatRenderer, env: FrozenLakeText, random: np.random.Generator, random_moves: float
) -> tuple[list[int], list[int]]:
    token_ids: list[int] = []
    loss_mask: list[int] = []
    observation, _ = env.reset(seed=int(random.integers(2**31)))
    done = False
    while not done:
        is_random = random.random() < random_moves
        words = tuple(ACTIONS) if is_random else best_moves(env.lake_map, env.position)
        word = words[int(random.integers(len(words)))]
        inserted = renderer.observation_ids(observation, not token_ids)
        reply = renderer.reply_ids(word)
        token_ids += [*inserted.tolist(), *reply.tolist()]
        loss_mask += [0] * len(inserted) + [1] * len(reply)
        observation, _, terminated, truncated, _ = env.step(word)
        done = terminated or truncated
    return token_ids, loss_mask


def best_moves(lake_map: FrozenLakeMap, position: int) -> tuple[str, ...]:
    """The words that begin a shortest path from `position` to the goal, on ice that does not slip."""
    return _best_moves(lake_map)[position]


@lru_cache(maxsize=4096)
def _best_moves(lake_map: FrozenLakeMap) -> tuple[tuple[str, ...], ...]:
    """Per cell the words that lead one step nearer."""
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
    """Moves to the last cell from every cell, infinite where there is no way."""
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
