"""Sums that a tiny model cannot compute by itself: rows, their reward, and simple players.

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
SIGNS = tuple(WORDS.values())
LARGEST = 99
HELD_OUT_SHARE = 10  # one question of this many is never trained


def rows(split: str, num_rows: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Different questions of a split, `train` or `held_out`, with their answers.

    Raises `ValueError` if there are not so many.
    """
    if num_rows > (there_are := num_questions(split)):
        raise ValueError(f"num_rows is {num_rows}, and {split} has {there_are} different questions")
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


def num_questions(split: str) -> int:
    """Returns how many different questions a split has."""
    numbers = range(LARGEST + 1)
    questions = (f"{ASK}{a} {word} {b}?" for a in numbers for b in numbers for word in WORDS)
    return sum(is_held_out(question) == (split == "held_out") for question in questions)


def draw_question(random: np.random.Generator) -> tuple[str, str]:
    """A question and the expression that answers it."""
    left, right = (int(number) for number in random.integers(0, LARGEST + 1, size=2))
    word = str(random.choice(list(WORDS)))
    return f"{ASK}{left} {word} {right}?", f"{left}{WORDS[word]}{right}"


def random_replies(random: np.random.Generator, question: str, calls: float) -> list[str]:
    """Replies of a player that knows the format alone: an expression for the tool, then an answer.

    The expression has any sign and two numbers of the question, in any order, or one of them twice. The
    answer is any number seen: of the question, or the result. `calls`: probability of a call.
    """
    seen, said = list(numbers_of(question)), []
    if random.random() < calls:
        said.append(_random_expression(random, seen))
        seen.append(calculate(said[-1]))
    return [*said, str(random.choice(seen))]


def numbers_of(question: str) -> list[str]:
    """The two numbers of a question."""
    return [word for word in question.rstrip("?").split() if word.isdigit()]


def _random_expression(random: np.random.Generator, numbers: list[str]) -> str:
    left, sign, right = (str(random.choice(some)) for some in (numbers, SIGNS, numbers))
    return f"{left}{sign}{right}"


def _replies_at_random(row: Mapping[str, Any], random: np.random.Generator) -> float:
    return float(random_replies(random, row["prompt"], calls=0.5)[-1] == row["answer"])


def _result_of_any_call(row: Mapping[str, Any], random: np.random.Generator) -> float:
    result = calculate(_random_expression(random, numbers_of(row["prompt"])))
    return float(result == row["answer"])


def _result_with_any_sign(row: Mapping[str, Any], random: np.random.Generator) -> float:
    result = calculate(str(random.choice(SIGNS)).join(numbers_of(row["prompt"])))
    return float(result == row["answer"])


# Simple players of the report: their success with a row.
rows.baselines = {  # type: ignore[attr-defined]
    "random": _replies_at_random,
    "result of any call": _result_of_any_call,
    "result with any sign": _result_with_any_sign,
}


def is_held_out(question: str) -> bool:
    """Returns whether a question is kept for evaluation."""
    return zlib.crc32(question.encode()) % HELD_OUT_SHARE == 0
