"""Port of scoring: a component that gives a number."""

from typing import Protocol

from tailrace_protos.reward import ScoreItem


class ComponentFailedError(Exception):
    """A component gave no number. Attributes: `source` (function, model, judge), `reason`."""

    def __init__(self, source: str, reason: str) -> None:
        super().__init__(f"{source} {reason}")
        self.source = source
        self.reason = reason


class Component(Protocol):
    """Gives the number of one component of the reward, isolated from the service."""

    async def score(self, item: ScoreItem) -> float:
        """The number for the item; raises `ComponentFailedError`."""
