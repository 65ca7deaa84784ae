"""Made-up towns, with passages and questions, for runs without a corpus and a data set."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tailrace.sdk import reward
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask

_FIRST = ("Bel", "Dor", "Fen", "Gal", "Har", "Kel", "Lom", "Mar", "Nor", "Pel", "Ros", "Tam")
_LAST = ("burg", "dale", "ford", "ham", "mouth", "stead", "ton", "wick")
_RIVERS = ("Aln", "Brue", "Cam", "Dee", "Esk", "Forth", "Goyt", "Hull")
_CRAFTS = ("glass", "rope", "clocks", "paper", "bells", "cheese", "sails", "bricks")
_SEED = 7
_HELD_OUT = 4  # every fourth town is a question of the evaluation


def _towns() -> list[tuple[str, str, str]]:
    """Towns with their river and their craft."""
    draw = random.Random(_SEED)
    names = [first + last for first in _FIRST for last in _LAST]
    return [(name, draw.choice(_RIVERS), draw.choice(_CRAFTS)) for name in names]


def passages() -> list[tuple[str, str]]:
    """Title and text of every passage."""
    return [
        (town, f"{town} is a town on the river {river}. It is known for its {craft}.")
        for town, river, craft in _towns()
    ]


def rows(split: str) -> Iterator[dict[str, Any]]:
    """Questions with answers; no town of `test` is asked for in `train`."""
    for number, (town, river, craft) in enumerate(_towns()):
        if (number % _HELD_OUT == 0) == (split == "test"):
            yield {"question": f"On which river does {town} lie?", "answer": river}
            yield {"question": f"What is {town} known for?", "answer": craft}


@reward
def letters(task: EnvTask, messages: Sequence[ChatMessage], metrics: Mapping[str, float]) -> float:
    """Share of letters in the last reply: even random weights can learn from it."""
    said = messages[-1].content
    return sum(char.isalpha() for char in said) / len(said) if said else 0.0
