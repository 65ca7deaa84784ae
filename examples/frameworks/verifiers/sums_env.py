"""A small environment of verifiers with a tool. Any installed environment works too."""

from __future__ import annotations

from typing import Any

import verifiers
from datasets import Dataset


def add(left: int, right: int) -> int:
    """The sum of two numbers."""
    return left + right


def is_right(completion: list[Any], answer: str) -> float:
    """Returns 1 if the last message is the answer."""
    return float((completion[-1].content or "").strip() == answer)


def load_environment(num_rows: int = 8) -> verifiers.Environment:
    """Makes sums to answer; training and evaluation have different ones."""

    def sums(first: int) -> Dataset:
        numbers = range(first, first + num_rows)
        return Dataset.from_list([{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in numbers])

    return verifiers.ToolEnv(
        tools=[add],
        dataset=sums(1),
        eval_dataset=sums(1 + num_rows),
        rubric=verifiers.Rubric(funcs=[is_right]),
    )
