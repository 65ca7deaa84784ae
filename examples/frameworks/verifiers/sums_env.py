"""A small environment of verifiers with a tool. Yours may be any that is installed."""

from __future__ import annotations

from typing import Any

import verifiers
from datasets import Dataset


def add(left: int, right: int) -> int:
    """The sum of two numbers."""
    return left + right


def is_right(completion: list[Any], answer: str) -> float:
    """Whether the last message is the answer."""
    return float((completion[-1].content or "").strip() == answer)


def load_environment(num_rows: int = 8) -> verifiers.Environment:
    """Sums to answer, those of evaluation others than those of training."""

    def sums(first: int) -> Dataset:
        numbers = range(first, first + num_rows)
        return Dataset.from_list([{"question": f"{n} + {n}?", "answer": str(2 * n)} for n in numbers])

    return verifiers.ToolEnv(
        tools=[add],
        dataset=sums(1),
        eval_dataset=sums(1 + num_rows),
        rubric=verifiers.Rubric(funcs=[is_right]),
    )
