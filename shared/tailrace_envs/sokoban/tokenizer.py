"""Tokenizer for a tiny model of Sokoban with at most two boxes and four inner columns.

A row of the board with its line feed is one token, and so is each action word. Other boards have one
token per cell.
"""

from itertools import product
from pathlib import Path

from tailrace_envs.sokoban.board import DIRECTIONS
from tailrace_envs.sokoban.environment import INVALID_NOTE
from tailrace_envs.word_tokenizer import any_of, build_word_tokenizer

CELLS = "#_OX*PS"
NUM_INNER_COLUMNS = 4


def build_sokoban_tokenizer(directory: str | Path) -> Path:
    """Writes the tokenizer's files; `AutoTokenizer` loads the directory."""
    width = NUM_INNER_COLUMNS + 2
    words = [*row_tokens(), *DIRECTIONS, INVALID_NOTE, *CELLS, "\n"]
    pattern = rf"#[{CELLS}]{{{width - 2}}}#\n|{any_of([*DIRECTIONS, INVALID_NOTE])}"
    return build_word_tokenizer(directory, words, pattern=pattern, max_length=2048)


def row_tokens() -> list[str]:
    """All possible rows of a board with two boxes: at most one player, two boxes and two goals."""
    rows = ("".join(cells) for cells in product(CELLS, repeat=NUM_INNER_COLUMNS))
    return [f"#{row}#\n" for row in rows if _can_occur(row)]


def _can_occur(row: str) -> bool:
    limits = {"PS": 1, "X*": 2, "OS*": 2}
    return all(sum(map(row.count, letters)) <= limit for letters, limit in limits.items())
