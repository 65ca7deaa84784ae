"""Shortest solutions by A*: states are positions, every move costs 1.

The estimate is the sum over boxes of the pushes to the nearest goal on a board without other boxes. It
is never too high, and infinite for a box that cannot reach a goal any more (in corners, along walls).
"""

import heapq
from functools import lru_cache
from itertools import count

from tailrace_envs.sokoban.board import DIRECTIONS, Board, Position

Moves = tuple[str, ...]


class SearchLimitError(Exception):
    """The search reached its limit. Attribute: `max_states`."""

    def __init__(self, max_states: int) -> None:
        super().__init__(
            f"no solution among the first {max_states} positions: use smaller levels or fewer boxes, "
            "or raise max_states"
        )
        self.max_states = max_states


def solve(board: Board, start: Position, max_states: int = 200_000) -> Moves | None:
    """Finds the moves of a shortest solution, None without one; `SearchLimitError` at `max_states`."""
    pushes = push_distances(board)
    first = _estimate(pushes, start)
    if first is None:
        return None
    numbers = count()
    heap = [(first, next(numbers), start)]
    came: dict[Position, tuple[Position, int] | None] = {start: None}
    costs = {start: 0}
    while heap:
        _, _, position = heapq.heappop(heap)
        if board.is_solved(position):
            return _path(came, position)
        if len(costs) > max_states:
            raise SearchLimitError(max_states)
        cost = costs[position] + 1
        for direction, step in enumerate(board.steps):
            after = board.moved(position, step)
            if after is position or costs.get(after, cost + 1) <= cost:
                continue
            estimate = _estimate(pushes, after)
            if estimate is None:
                continue
            costs[after] = cost
            came[after] = (position, direction)
            heapq.heappush(heap, (cost + estimate, next(numbers), after))
    return None


@lru_cache(maxsize=8192)
def push_distances(board: Board) -> tuple[int, ...]:
    """For each cell, the number of pushes to the nearest goal; -1 if a box cannot reach a goal."""
    distances = [-1] * len(board.is_floor)
    frontier = sorted(board.goals)
    for goal in frontier:
        distances[goal] = 0
    for cell in frontier:
        for step in board.steps:
            before, behind = cell - step, cell - 2 * step
            if board.is_floor[before] and distances[before] < 0 and board.is_floor[behind]:
                distances[before] = distances[cell] + 1
                frontier.append(before)
    return tuple(distances)


def _estimate(pushes: tuple[int, ...], position: Position) -> int | None:
    """Lower bound of the pushes that are left; None if a box cannot reach a goal."""
    total = 0
    for box in position.boxes:
        if pushes[box] < 0:
            return None
        total += pushes[box]
    return total


def _path(came: dict[Position, tuple[Position, int] | None], last: Position) -> Moves:
    moves = []
    while (step := came[last]) is not None:
        last, direction = step
        moves.append(DIRECTIONS[direction])
    return tuple(reversed(moves))
