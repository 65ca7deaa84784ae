"""Levels by reverse play: boxes start on their goals and are pulled away at random.

A push undoes a pull, so every level is solvable: by the moves of the play in reverse. A level is a pure
function of (settings, split, seed): numpy's `RandomState`, whose stream is the same in all versions,
draws the numbers. A hash of the walls, the same for their mirror images and rotations, decides the
split of a level: held-out levels have other layouts than train levels. In very small rooms, and
without inner walls, goals and boxes are parts of the layout.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from tailrace_envs.sokoban.board import Board, Position
from tailrace_envs.sokoban.config import SokobanConfig
from tailrace_envs.splits import is_held_out, symmetric_text

MAX_ATTEMPTS = 2000
HELD_OUT_SHARE = 0.25
MIN_INNER_CELLS = 16  # smaller rooms have few layouts of walls


class NoLevelError(ValueError):
    """No level exists for these settings. Attribute: `num_attempts`."""

    def __init__(self, config: SokobanConfig) -> None:
        super().__init__(
            f"no Sokoban level in {MAX_ATTEMPTS} attempts with dim_room {list(config.dim_room)}, "
            f"num_boxes {config.num_boxes}, wall_share {config.wall_share:g}, max_turns "
            f"{config.max_turns}, split {config.split!r}: raise dim_room or max_turns, lower "
            "num_boxes, wall_share or max_pulls; a small board may have too few layouts for two "
            "splits: use split 'all'"
        )
        self.num_attempts = MAX_ATTEMPTS


class Level(NamedTuple):
    """Board with its start position and the number of moves of one solution."""

    board: Board
    start: Position
    max_solution_moves: int


@lru_cache(maxsize=8192)
def level_for_seed(config: SokobanConfig, seed: int) -> Level:
    """Level of a split that a seed selects; `NoLevelError` if the split is empty."""
    words = [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for attempt in range(MAX_ATTEMPTS):
        random = np.random.RandomState([*words, attempt])
        level = _level(config, random)
        if level is None or level.max_solution_moves > config.max_turns:
            continue
        if config.split == "all" or has_held_out_layout(level) == (config.split == "held_out"):
            return level
    raise NoLevelError(config)


@lru_cache(maxsize=8192)
def has_held_out_layout(level: Level) -> bool:
    """True for a quarter of all layouts."""
    board = level.board
    floor = np.array(board.is_floor).reshape(-1, board.num_columns)
    layout = floor.astype(np.uint8)
    inner = floor[1:-1, 1:-1]
    if inner.all() or inner.size < MIN_INNER_CELLS:
        layout.ravel()[list(board.goals)] += 2
        layout.ravel()[list(level.start.boxes)] += 4
    return is_held_out(f"layout {symmetric_text(layout)}", HELD_OUT_SHARE)


def _level(config: SokobanConfig, random: np.random.RandomState) -> Level | None:
    """Makes one attempt; None if a box never left its goal, or if the floor is too small."""
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
    """Draws the inner walls such that the floor stays connected."""
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
        if _is_connected(floor, columns):
            num_walls -= 1
        else:
            floor[inner[index]] = True
    return floor


def _is_connected(floor: list[bool], columns: int) -> bool:
    board = Board(columns, tuple(floor), frozenset())
    return len(walk_distances(board, floor.index(True), frozenset())) == sum(floor)


def _reverse_play(
    board: Board, places: list[int], max_pulls: int, random: np.random.RandomState
) -> Iterator[tuple[Position, int, int]]:
    """Yields positions with every box off all goals, with (distance pulled, moves to solve)."""
    player, boxes = places[0], places[1:]
    box_goals = list(boxes)
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
                _manhattan(box, goal, board.num_columns)
                for box, goal in zip(boxes, box_goals, strict=True)
            )
            yield Position(player, frozenset(boxes)), distance, num_moves


def _pulls(
    board: Board, boxes: list[int], taken: frozenset[int], reach: dict[int, int]
) -> list[tuple[int, int]]:
    """Lists (box, step) of all pulls: the player reaches the box and has room to step back."""
    return [
        (index, step)
        for index, box in enumerate(boxes)
        for step in board.steps
        if box + step in reach and board.is_floor[box + 2 * step] and box + 2 * step not in taken
    ]


def walk_distances(board: Board, start: int, boxes: frozenset[int]) -> dict[int, int]:
    """Number of steps to each cell that the player reaches without pushing."""
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
