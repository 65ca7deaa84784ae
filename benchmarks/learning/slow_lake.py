"""FrozenLake whose every answer takes as long as one behind a network might."""

from __future__ import annotations

import random
import time
from typing import Any, SupportsFloat

from tailrace_envs.frozen_lake import FrozenLakeText


class SlowLake(FrozenLakeText):
    """`FrozenLakeText` that waits before every answer: lognormal, `median_s` seconds in the median,
    with the logarithm's deviation `sigma`. Waiting changes nothing else.
    """

    def __init__(self, *, median_s: float, sigma: float, **lake: Any) -> None:
        super().__init__(**lake)
        self._median_s = median_s
        self._sigma = sigma
        self._draw = random.Random()

    def step(self, action: str) -> tuple[str, SupportsFloat, bool, bool, dict[str, Any]]:
        """See `FrozenLakeText.step`."""
        time.sleep(self._median_s * self._draw.lognormvariate(0.0, self._sigma))
        return super().step(action)
