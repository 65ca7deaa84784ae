"""Tokenizer for a tiny model of Sokoban: the cells around the player, and offsets.

It reads boards of `view_radius: 2` in rooms of at most eight rows and columns, with at most two boxes:
a row of five cells is two tokens, and each place in the line of `offsets` is two, its rows and its
columns, so that what is learnt about one direction holds at every place. Each action word is a token.
Other boards have one token per cell.
"""

from itertools import product
from pathlib import Path

from tailrace_envs.sokoban.board import DIRECTIONS
from tailrace_envs.sokoban.environment import INVALID_NOTE
from tailrace_envs.word_tokenizer import any_of, build_word_tokenizer

CELLS = "#_OX*PS"
VIEW_RADIUS = 2
LONGEST_OFFSET = 5  # between two inner cells of eight rows or columns
_LIMITS = {"PS": 1, "X*": 2, "OS*": 2}  # players, boxes, goals


def build_sokoban_tokenizer(directory: str | Path) -> Path:
    """Writes the tokenizer's files; `AutoTokenizer` loads the directory."""
    words = [*row_tokens(), *offset_tokens(), *DIRECTIONS, INVALID_NOTE, *CELLS, "\n"]
    left, right = VIEW_RADIUS + 1, VIEW_RADIUS
    begun = rf"[{CELLS}]{{{left}}}"
    ended = rf"[{CELLS}]{{{right}}}\n"
    rows = rf"(?<![{CELLS}]){begun}(?={ended})|(?<=\A{begun}|\n{begun}){ended}"
    pattern = f"{any_of([*offset_tokens(), *DIRECTIONS, INVALID_NOTE])}|{rows}"
    return build_word_tokenizer(directory, words, pattern=pattern, max_length=2048)


def row_tokens() -> list[str]:
    """All parts of rows: three cells, and two with the line feed."""
    lefts = map("".join, product(CELLS, repeat=VIEW_RADIUS + 1))
    rights = map("".join, product(CELLS, repeat=VIEW_RADIUS))
    ends = (f"{right}\n" for right in rights)
    return [part for part in (*lefts, *ends) if _can_occur(part)]


def offset_tokens() -> list[str]:
    """Rows, those of the first box and of the first goal with their letter; and columns."""
    lengths = range(-LONGEST_OFFSET, LONGEST_OFFSET + 1)
    return [f"{before}{length}" for before in ("X ", " O ", " ", ",") for length in lengths]


def _can_occur(part: str) -> bool:
    return all(sum(map(part.count, letters)) <= limit for letters, limit in _LIMITS.items())
