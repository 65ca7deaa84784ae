"""Sums that a tiny model cannot compute by itself: rows and their reward.

To answer "What is 37 times 46?" the model must copy the numbers into a tool call, read the tool's
result and repeat it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tailrace.sdk import reward
from tailrace.toolbox.calculator import calculate
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask

ASK = "What is "
WORDS = {"plus": "+", "minus": "-", "times": "*"}
LARGEST = 99
HELD_OUT_SHARE = 10  # one question of this many is never trained


def rows(split: str, num_rows: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Different questions of a split, `train` or `held_out`, with their answers."""
    random = np.random.default_rng([seed, split == "train"])
    seen: set[str] = set()
    while len(seen) < num_rows:
        question, expression = draw_question(random)
        if question not in seen and is_held_out(question) == (split == "held_out"):
            seen.add(question)
            yield {"prompt": question, "answer": calculate(expression), "expression": expression}


@reward
def correct(task: EnvTask, messages: Sequence[ChatMessage], metrics: Mapping[str, float]) -> float:
    """1 if the last reply is the answer and nothing else, else 0."""
    return float(messages[-1].content.strip() == task.row["answer"])


def draw_question(random: np.random.Generator) -> tuple[str, str]:
    """A question and the expression that answers it."""
    left, right = (int(number) for number in random.integers(0, LARGEST + 1, size=2))
    word = str(random.choice(list(WORDS)))
    return f"{ASK}{left} {word} {right}?", f"{left}{WORDS[word]}{right}"


def is_held_out(question: str) -> bool:
    """Returns whether a question is kept for evaluation."""
    return zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0
