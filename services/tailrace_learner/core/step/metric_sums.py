"""Sums behind a step's metrics: means of all that was added, in any order."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from tailrace_learner.core.algorithms import kl


class MetricSums:
    """Weighted sums by name; tensors stay on their device until they are read."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = defaultdict(float)
        self._weights: dict[str, float] = defaultdict(float)

    def add(self, name: str, total: Tensor | float, weight: float) -> None:
        """Adds a sum over `weight` things."""
        self._sums[name] = self._sums[name] + (
            total.detach().double() if isinstance(total, Tensor) else total
        )
        self._weights[name] += weight

    def take(self, other: "MetricSums") -> None:
        """Adds all sums of another object."""
        for name, weight in other._weights.items():
            self.add(name, other._sums[name], weight)

    def totals(self) -> dict[str, tuple[float, float]]:
        """Sum and weight per name."""
        return {name: (float(self._sums[name]), weight) for name, weight in self._weights.items()}

    def split(self, prefix: str) -> "MetricSums":
        """Takes out the sums whose names begin with `prefix`, and removes the prefix."""
        part = MetricSums()
        for name in [name for name in self._weights if name.startswith(prefix)]:
            part.add(name.removeprefix(prefix), self._sums.pop(name), self._weights.pop(name))
        return part

    @classmethod
    def of_all(cls, totals: Sequence[Mapping[str, tuple[float, float]]]) -> "MetricSums":
        """Adds the sums of several objects."""
        sums = cls()
        for part in totals:
            for name, (total, weight) in part.items():
                sums.add(name, total, weight)
        return sums

    def means(self) -> dict[str, float]:
        """Mean per name; names whose weights are 0 are left out."""
        return {name: float(self._sums[name]) / w for name, w in self._weights.items() if w > 0}


def k3(log_sampler: Tensor, log_other: Tensor) -> Tensor:
    """Estimates `kl.k3` of KL(sampler || other) on the sampler's tokens [M].

    In float64, since nearly equal float32 log-probabilities cancel.
    """
    return kl.k3(log_sampler.double(), log_other.double())
