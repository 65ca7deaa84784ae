"""What scoring needs from outside: somebody who calls the user's functions."""

from __future__ import annotations

from typing import Protocol

from tailrace_protos.reward import ScoreItem


class FunctionFailedError(Exception):
    """A reward function gave no number. Attributes: `function`, `reason`."""

    def __init__(self, function: str, reason: str) -> None:
        super().__init__(f"{function} {reason}")
        self.function = function
        self.reason = reason


class FunctionRunner(Protocol):
    """Calls reward functions where they can do no harm."""

    async def call(self, function: str, item: ScoreItem, timeout_s: float) -> float:
        """What `function` (`module:name`) gives for the item; raises `FunctionFailedError`."""
