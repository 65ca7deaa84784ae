"""Levels by reverse play: boxes begin on their goals and are pulled away at random.

Every pull is undone by a push, so a level is solvable by construction, in the moves of the play
backwards. A level is a pure function of (settings, split, seed): numbers come from numpy's
`RandomState`, whose stream never changes between versions. A level belongs to one split, for ever and
everywhere, by a hash of its walls, goals and boxes: a held-out level is never a train level, not even
with the player in another place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tailrace_envs.sokoban.board import Board, Position
from tailrace_envs.sokoban.config import SokobanConfig

MAX_ATTEMPTS = 2000


class NoLevelError(ValueError):
    """These settings give no level. Attribute: `num_attempts`."""

    def __init__(self, config: SokobanConfig) -> None:
        super().__init__(
            f"no Sokoban level in {MAX_ATTEMPTS} attempts with dim_room {list(config.dim_room)}, "
            f"num_boxes {config.num_boxes}, wall_share {config.wall_share:g}, max_turns "
            f"{config.max_turns}: raise dim_room or max_turns, lower num_boxes, wall_share or max_pulls"
        )
        self.num_attempts = MAX_ATTEMPTS


class Level(NamedTuple):
    """A board with its start, and the moves of one solution at most."""

    board: Board
    start: Position
    max_solution_moves: int


@lru_cache(maxsize=8192)
def level_for_seed(config: SokobanConfig, seed: int) -> Level:
    """The level that a seed chooses from the split; `NoLevelError` if settings leave it empty."""
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for attempt in range(MAX_ATTEMPTS):
        random = np.random.RandomState([*words, attempt])
        level = _level(config, random)
        if level is None or level.max_solution_moves > config.max_turns:
            continue
        if config.split == "all" or is_held_out(level) == (config.split == "held_out"):
            return level
    raise NoLevelError(config)


def is_held_out(level: Level) -> bool:
    """The split of a level: half of all levels are held out."""
    nobody = Position(-1, level.start.boxes)
    digest = hashlib.blake2b(level.board.text(nobody).encode(), digest_size=1).digest()
    return digest[0] < 128


def _level(config: SokobanConfig, random: np.random.RandomState) -> Level | None:
    """One attempt; None if some box never left its goal or no place is left."""
    floor = _floor(config, random)
    cells = [cell for cell, is_floor in enumerate(floor) if is_floor]
    if len(cells) <= 2 * config.num_boxes:
        return None
    places = [cells[index] for index in random.permutation(len(cells))[: config.num_boxes + 1]]
    board = Board(config.dim_room[1], tuple(floor), frozenset(places[1:]))
    best: Level | None = None
    most = 0
    for position, distance, num_moves in _reverse_play(board, places, config.max_pulls, random):
        if distance > most:
            most, best = distance, Level(board, position, num_moves)
    return best


def _floor(config: SokobanConfig, random: np.random.RandomState) -> list[bool]:
    """Walls around, and walls inside as long as the floor hangs together."""
    rows, columns = config.dim_room
    inner = [row * columns + column for row in range(1, rows - 1) for column in range(1, columns - 1)]
    floor = [False] * (rows * columns)
    for cell in inner:
        floor[cell] = True
    num_walls = round(config.wall_share * len(inner))
    for index in random.permutation(len(inner)):
        if num_walls == 0:
            break
        floor[inner[index]] = False
        if _hangs_together(floor, columns):
            num_walls -= 1
        else:
            floor[inner[index]] = True
    return floor


def _hangs_together(floor: list[bool], columns: int) -> bool:
    board = Board(columns, tuple(floor), frozenset())
    return len(walk_distances(board, floor.index(True), frozenset())) == sum(floor)


def _reverse_play(
    board: Board, places: list[int], max_pulls: int, random: np.random.RandomState
) -> Iterator[tuple[Position, int, int]]:
    """Positions in which every box is off all goals, with (distance pulled, moves to solve)."""
    player, boxes = places[0], places[1:]
    homes = list(boxes)
    num_moves = 0
    for draw in random.random_sample(max_pulls):
        taken = frozenset(boxes)
        reach = walk_distances(board, player, taken)
        pulls = _pulls(board, boxes, taken, reach)
        if not pulls:
            return
        index, step = pulls[int(draw * len(pulls))]
        before = boxes[index] + step  # the player stands here and pulls the box to this cell
        num_moves += reach[before] + 1
        boxes[index], player = before, before + step
        if board.goals.isdisjoint(boxes):
            distance = sum(
                _manhattan(box, home, board.num_columns) for box, home in zip(boxes, homes, strict=True)
            )
            yield Position(player, frozenset(boxes)), distance, num_moves


def _pulls(
    board: Board, boxes: list[int], taken: frozenset[int], reach: dict[int, int]
) -> list[tuple[int, int]]:
    """(box, step) of all pulls: the player gets beside the box and has room to step back."""
    return [
        (index, step)
        for index, box in enumerate(boxes)
        for step in board.steps
        if box + step in reach and board.is_floor[box + 2 * step] and box + 2 * step not in taken
    ]


def walk_distances(board: Board, start: int, boxes: frozenset[int]) -> dict[int, int]:
    """Steps to every cell that the player reaches without pushing."""
    distances = {start: 0}
    frontier = [start]
    for cell in frontier:
        for step in board.steps:
            near = cell + step
            if board.is_floor[near] and near not in boxes and near not in distances:
                distances[near] = distances[cell] + 1
                frontier.append(near)
    return distances


def _manhattan(one: int, other: int, columns: int) -> int:
    rows = one // columns - other // columns
    return abs(rows) + abs(one % columns - other % columns)
