"""The conversations of the benchmark, each in words of its own, so that nothing is known beforehand."""

from __future__ import annotations

import itertools
import random

from benchmarks.gateway.model import REPLY

NUM_TURNS = 4

_numbers = itertools.count()


class Talk:
    """One conversation of `NUM_TURNS` turns. `waits_s`: how long the engine takes for each."""

    def __init__(self, mean_wait_s: float = 0.0) -> None:
        number = next(_numbers)
        chance = random.Random(number)
        self._words = f"Tell me about fox {number} and what it does all day long. " * 4
        self.waits_s = [mean_wait_s * chance.uniform(0.5, 1.5) for _ in range(NUM_TURNS)]

    def messages(self, turn: int) -> list[dict[str, str]]:
        """Messages that an agent sends in a turn, by its number."""
        messages = []
        for earlier in range(turn):
            messages += [self._said(earlier), {"role": "assistant", "content": REPLY}]
        return [*messages, self._said(turn)]

    def _said(self, turn: int) -> dict[str, str]:
        wait_s = self.waits_s[turn]
        return {"role": "user", "content": self._words + (f"@{wait_s:.4f}@" if wait_s else "")}
