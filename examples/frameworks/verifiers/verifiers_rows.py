"""Rows to play; the agents service, which has no verifiers, reads this file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def rows(split: str, num_rows: int = 8) -> Iterator[dict[str, Any]]:
    """The numbers of the environment's rows, of its data set for `train` or for evaluation."""
    for number in range(num_rows):
        yield {"row": number, "split": split}
