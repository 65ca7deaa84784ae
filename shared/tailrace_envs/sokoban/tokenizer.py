"""Tokenizer for a tiny model of Sokoban with at most two boxes and four to six inner columns.

Half a row of the board is one token: the left half with the wall before it, the right half with the
wall and the line feed after it. A row of walls is one token, and so is each action word. Halves recur
in other rows and other rooms, so that training shows every token often. Other boards have one token
per cell.
"""

from itertools import product
from pathlib import Path

from tailrace_envs.sokoban.board import DIRECTIONS
from tailrace_envs.sokoban.environment import INVALID_NOTE
from tailrace_envs.word_tokenizer import any_of, build_word_tokenizer

CELLS = "#_OX*PS"
INNER_COLUMNS = (4, 5, 6)
_LIMITS = {"PS": 1, "X*": 2, "OS*": 2}  # players, boxes, goals


def build_sokoban_tokenizer(directory: str | Path) -> Path:
    """Writes the tokenizer's files; `AutoTokenizer` loads the directory."""
    known = (*half_tokens(), *map(_wall, INNER_COLUMNS), *place_tokens())
    words = [*known, *DIRECTIONS, INVALID_NOTE, *CELLS, "\n"]
    rows = map(_row_pattern, sorted(INNER_COLUMNS, reverse=True))
    pattern = "|".join((any_of([*DIRECTIONS, INVALID_NOTE]), *rows, any_of(place_tokens())))
    return build_word_tokenizer(directory, words, pattern=pattern, max_length=2048)


def half_tokens() -> list[str]:
    """All halves of rows that can occur: at most one player, two boxes and two goals."""
    lengths = {length for columns in INNER_COLUMNS for length in _lengths(columns)}
    halves = ["".join(cells) for length in sorted(lengths) for cells in product(CELLS, repeat=length)]
    possible = [half for half in halves if _can_occur(half)]
    return [f"#{half}" for half in possible] + [f"{half}#\n" for half in possible]


def place_tokens() -> list[str]:
    """Places in the line of coordinates, with the letter before the first place of its kind."""
    rows = range(1, max(INNER_COLUMNS) + 1)
    places = [f"{row},{column}" for row, column in product(rows, repeat=2)]
    return [f"{before}{place}" for before in ("P ", " X ", " O ", " ") for place in places]


def _lengths(num_columns: int) -> tuple[int, int]:
    """Cells of the left and of the right half."""
    return -(-num_columns // 2), num_columns // 2


def _wall(num_columns: int) -> str:
    return "#" * (num_columns + 2) + "\n"


def _row_pattern(num_columns: int) -> str:
    """Finds a row of walls, a left half before its right half, or a right half."""
    left, right = _lengths(num_columns)
    return (
        rf"{_wall(num_columns)}|#[{CELLS}]{{{left}}}(?=[{CELLS}]{{{right}}}#\n)|[{CELLS}]{{{right}}}#\n"
    )


def _can_occur(half: str) -> bool:
    return all(sum(map(half.count, letters)) <= limit for letters, limit in _LIMITS.items())
