"""Rules of Sokoban on a board whose cells are numbered row by row.

A board is immutable; only the `Position` changes during an episode. Letters: `#` wall, `_` floor, `O`
goal, `X` box, `*` box on a goal, `P` player, `S` player on a goal.
"""

from typing import NamedTuple

DIRECTIONS = ("Up", "Down", "Left", "Right")


class Position(NamedTuple):
    """Cells of the player and of the boxes."""

    player: int
    boxes: frozenset[int]


class Board(NamedTuple):
    """Immovable parts: floor with walls all around it, and goals."""

    num_columns: int
    is_floor: tuple[bool, ...]  # per cell
    goals: frozenset[int]

    @property
    def steps(self) -> tuple[int, int, int, int]:
        """Difference of cell numbers for each of `DIRECTIONS`."""
        return (-self.num_columns, self.num_columns, -1, 1)

    def moved(self, position: Position, step: int) -> Position:
        """Position after the player tries to walk or to push a box; unchanged if nothing can move."""
        ahead = position.player + step
        if ahead not in position.boxes:
            return Position(ahead, position.boxes) if self.is_floor[ahead] else position
        beyond = ahead + step
        if not self.is_floor[beyond] or beyond in position.boxes:
            return position
        return Position(ahead, (position.boxes - {ahead}) | {beyond})

    def num_on_goals(self, position: Position) -> int:
        """Number of boxes on goals."""
        return len(position.boxes & self.goals)

    def is_solved(self, position: Position) -> bool:
        """True if every box is on a goal."""
        return position.boxes <= self.goals

    def text(self, position: Position) -> str:
        """Board as letters, one line per row."""
        cells = [self._letter(cell, position) for cell in range(len(self.is_floor))]
        width = self.num_columns
        rows = ("".join(cells[start : start + width]) for start in range(0, len(cells), width))
        return "\n".join(rows) + "\n"

    def place(self, cell: int) -> tuple[int, int]:
        """Row and column of a cell."""
        return divmod(cell, self.num_columns)

    def offsets(self, position: Position) -> str:
        """Rows down and columns right from the player to each box and each goal, in one line."""
        row, column = self.place(position.player)
        seen = {
            letter: [(down - row, right - column) for down, right in map(self.place, sorted(cells))]
            for letter, cells in (("X", position.boxes), ("O", self.goals))
        }
        parts = (
            f"{letter} {' '.join(f'{down},{right}' for down, right in places)}"
            for letter, places in seen.items()
        )
        return " ".join(parts) + "\n"

    def _letter(self, cell: int, position: Position) -> str:
        if not self.is_floor[cell]:
            return "#"
        if cell == position.player:
            return "S" if cell in self.goals else "P"
        if cell in position.boxes:
            return "*" if cell in self.goals else "X"
        return "O" if cell in self.goals else "_"
