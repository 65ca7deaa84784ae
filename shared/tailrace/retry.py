"""Delays between retries."""

import asyncio
import random


class Backoff:
    """Exponential delays with jitter: `first_s`, then times `factor`, at most `max_s`.

    Jitter subtracts a random share of the delay, so that callers that failed together do not retry
    together.
    """

    def __init__(
        self, first_s: float = 0.05, max_s: float = 5.0, *, factor: float = 2.0, jitter: float = 0.25
    ) -> None:
        assert 0 < first_s <= max_s
        assert factor >= 1
        assert 0 <= jitter < 1
        self._first_s = first_s
        self._max_s = max_s
        self._factor = factor
        self._jitter = jitter
        self._base_s = first_s
        self.num_failures = 0

    def next_s(self) -> float:
        """Returns the next delay."""
        base_s = self._base_s
        self._base_s = min(base_s * self._factor, self._max_s)
        self.num_failures += 1
        return base_s * (1 - self._jitter * random.random())

    def reset(self) -> None:
        """Starts again with `first_s`, after a success."""
        self._base_s = self._first_s
        self.num_failures = 0

    async def sleep(self) -> None:
        """Waits for the next delay."""
        await asyncio.sleep(self.next_s())
