"""How many tokens episodes usually get."""

from __future__ import annotations

from dataclasses import dataclass, field


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
