"""What scoring needs from outside: somebody who gives a component's number."""

from __future__ import annotations

from typing import Protocol

from tailrace_protos.reward import ScoreItem


class ComponentFailedError(Exception):
    """A component gave no number. Attributes: `source` (function, model, judge), `reason`."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source} {reason}")
        self.source = source
        self.reason = reason


class Component(Protocol):
    """Gives the number of one component of the reward, where it can do no harm."""

    async def score(self, item: ScoreItem) -> float:
        """The number for the item; raises `ComponentFailedError`."""
