"""Tokenizers for tiny models of FrozenLake, as Hugging Face files.

A grid row of four cells with its line feed is one token, and so is each action word and each role. A
turn has eight tokens: the user's marker, four rows and the assistant's marker (inserted), an action and
the end of turn (sampled). Other text is encoded as single characters where the vocabulary has them
(larger grids), else as `<|unk|>`, so that every text can be encoded.

The view tokenizer reads the cells around the agent (`view_radius: 3`): a row of seven cells is two
tokens, and one if it is outside of the lake.
"""

import re
from itertools import product
from pathlib import Path

from tailrace_envs.frozen_lake import ACTIONS, INVALID_NOTE, OUTSIDE
from tailrace_envs.word_tokenizer import any_of, build_word_tokenizer

CELLS = "FHSGP"
CHARACTERS = (*CELLS, "\n", " ", ".")
VIEW_RADIUS = 3
_OUTSIDE_ROW = OUTSIDE * (2 * VIEW_RADIUS + 1) + "\n"
_SEEN = re.compile(f"{OUTSIDE}*S?[FH]*[GP]?{OUTSIDE}*")  # the lake is one piece, G and P stand last


def row_tokens() -> list[str]:
    """All possible rows of a grid with four columns: S only first, G only last, at most one P."""
    rows = ("".join(cells) + "\n" for cells in product(CELLS, repeat=4))
    return [row for row in rows if _can_occur(row)]


def _can_occur(row: str) -> bool:
    cells = row[:4]
    if cells.count("P") > 1 or ("S" in cells and "G" in cells):
        return False
    return cells.rfind("S") <= 0 and cells.find("G") in (-1, 3)


def view_tokens() -> list[str]:
    """All parts of a view's rows: the first four cells, P last in the middle row; three last cells."""
    lefts = map("".join, product(OUTSIDE + CELLS, repeat=VIEW_RADIUS + 1))
    rights = map("".join, product(OUTSIDE + "FHSG", repeat=VIEW_RADIUS))
    return [
        _OUTSIDE_ROW,
        *(left for left in lefts if _SEEN.fullmatch(left) and left.find("P") in (-1, VIEW_RADIUS)),
        *(f"{right}\n" for right in rights if _SEEN.fullmatch(right)),
    ]


def build_frozen_lake_tokenizer(directory: str | Path) -> Path:
    """Writes `tokenizer.json` and `tokenizer_config.json`; `AutoTokenizer` loads the directory."""
    pattern = rf"[{CELLS}]{{4}}\n|{any_of([*ACTIONS, INVALID_NOTE])}"
    return build_word_tokenizer(directory, _words(), pattern=pattern, max_length=1024)


def build_view_lake_tokenizer(directory: str | Path) -> Path:
    """As `build_frozen_lake_tokenizer`, for `view_radius: 3` and lakes of any size."""
    cell = f"[{OUTSIDE}{CELLS}]"
    parts = rf"{cell}{{{VIEW_RADIUS + 1}}}(?={cell}{{{VIEW_RADIUS}}}\n)|{cell}{{{VIEW_RADIUS}}}\n"
    pattern = rf"{_OUTSIDE_ROW}|{parts}|{any_of([*ACTIONS, INVALID_NOTE])}"
    words = [*view_tokens(), *ACTIONS, INVALID_NOTE, *CHARACTERS, OUTSIDE]
    return build_word_tokenizer(directory, words, pattern=pattern, max_length=1024)


def _words() -> list[str]:
    return [*row_tokens(), *ACTIONS, INVALID_NOTE, *CHARACTERS]
