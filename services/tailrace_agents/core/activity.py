"""What the episodes of this worker are doing at this moment, and how long they usually get."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Stages:
    """Episodes in each stage, counted by whoever makes them wait."""

    num_generating: int = 0
    num_in_tools: int = 0
    num_in_reward: int = 0
    num_settling: int = 0


@dataclass(slots=True)
class LengthEstimate:
    """Expected tokens of an episode by environment: an exponential mean of the finished ones."""

    default_tokens: int
    weight: float = 0.05
    _means: dict[str, float] = field(default_factory=dict)

    def predict(self, env_name: str) -> int:
        """Tokens that an episode of this environment will probably have."""
        return round(self._means.get(env_name, self.default_tokens))

    def observe(self, env_name: str, num_tokens: int) -> None:
        """An episode ended with so many tokens."""
        mean = self._means.get(env_name, float(num_tokens))
        self._means[env_name] = mean + self.weight * (num_tokens - mean)
