"""Tasks that a program solves, and their reward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tailrace.sdk import reward
from tailrace_protos.chat import ChatMessage
from tailrace_protos.episode import EnvTask


def rows(split: str = "train", seed: int = 0) -> Iterator[dict[str, Any]]:
    """Sums of squares that are too long to compute in the head."""
    for last in range(100, 164):
        answer = sum(number * number for number in range(1, last + 1))
        yield {"prompt": f"What is the sum of the squares of 1 to {last}?", "answer": str(answer)}


@reward
def solved(task: EnvTask, messages: Sequence[ChatMessage], metrics: Mapping[str, float]) -> float:
    """1 if the last reply has the answer, else at most 0: the smaller, the fewer of it are digits."""
    said = messages[-1].content
    if task.row["answer"] in said:
        return 1.0
    return 0.1 * (sum(character.isdigit() for character in said) / max(len(said), 1) - 1.0)
