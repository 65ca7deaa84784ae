"""Tokenizers for tiny models of FrozenLake, as Hugging Face files.

A grid row of four cells with its line feed is one token, and so is each action word and each role. A
turn has eight tokens: the user's marker, four rows and the assistant's marker (inserted), an action and
the end of turn (sampled). Other text is encoded as single characters where the vocabulary has them
(larger grids), else as `<|unk|>`, so that every text can be encoded.

The wide tokenizer also reads grids of five to eight columns: a row is two tokens, its first four cells
and the rest with the line feed. Grids of four columns have the same ids in both.
"""

from itertools import product
from pathlib import Path

from tailrace_envs.frozen_lake import ACTIONS, INVALID_NOTE
from tailrace_envs.word_tokenizer import any_of, build_word_tokenizer

CELLS = "FHSGP"
CHARACTERS = (*CELLS, "\n", " ", ".")


def row_tokens() -> list[str]:
    """All possible rows of a grid with four columns: S only first, G only last, at most one P."""
    rows = ("".join(cells) + "\n" for cells in product(CELLS, repeat=4))
    return [row for row in rows if _can_occur(row)]


def _can_occur(row: str) -> bool:
    cells = row[:4]
    if cells.count("P") > 1 or ("S" in cells and "G" in cells):
        return False
    return cells.rfind("S") <= 0 and cells.find("G") in (-1, 3)


def part_tokens() -> list[str]:
    """All parts of rows with five to eight columns: four first cells, one to four last ones."""
    lefts = ("".join(cells) for cells in product("FHSP", repeat=4))
    rights = ("".join(cells) for length in range(1, 5) for cells in product("FHGP", repeat=length))
    return [left for left in lefts if left.count("P") <= 1 and left.rfind("S") <= 0] + [
        f"{right}\n" for right in rights if right.count("P") <= 1 and "G" not in right[:-1]
    ]


def build_frozen_lake_tokenizer(directory: str | Path) -> Path:
    """Writes `tokenizer.json` and `tokenizer_config.json`; `AutoTokenizer` loads the directory."""
    pattern = rf"[{CELLS}]{{4}}\n|{any_of([*ACTIONS, INVALID_NOTE])}"
    return build_word_tokenizer(directory, _words(), pattern=pattern, max_length=1024)


def build_wide_lake_tokenizer(directory: str | Path) -> Path:
    """As `build_frozen_lake_tokenizer`, for grids of up to eight columns."""
    rows = rf"[{CELLS}]{{4}}(?=[{CELLS}]{{1,4}}\n)|[{CELLS}]{{1,4}}\n"
    pattern = rf"{rows}|{any_of([*ACTIONS, INVALID_NOTE])}"
    words = [*_words(), *part_tokens()]
    return build_word_tokenizer(directory, words, pattern=pattern, max_length=1024)


def _words() -> list[str]:
    return [*row_tokens(), *ACTIONS, INVALID_NOTE, *CHARACTERS]
