"""A tokenizer with the tokens of another one under other ids."""

from __future__ import annotations

from pathlib import Path

from tailrace_envs.frozen_lake import ACTIONS, INVALID_NOTE
from tailrace_envs.frozen_lake_tokenizer import CHARACTERS, row_tokens
from tailrace_envs.word_tokenizer import any_of, build_word_tokenizer


def reversed_tokenizer(directory: str | Path) -> Path:
    words = [*ACTIONS, INVALID_NOTE, *row_tokens(), *CHARACTERS]
    pattern = rf"[FHSGP]{{4}}\n|{any_of([*ACTIONS, INVALID_NOTE])}"
    return build_word_tokenizer(directory, words, pattern=pattern, max_length=1024)
