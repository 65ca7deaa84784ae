"""Interface of a strategy. All ranks must call a method marked as collective, in the same order."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.ports import Ranks, WeightUpdater

Moments = dict[str, Tensor]


class Strategy(Protocol):
    """Lays one model and its optimizer over the ranks."""

    ranks: Ranks  # that share the rows of a step; several processes may count as one
    world: Ranks  # all processes

    def spread(self, policy: PolicyModel) -> PolicyModel:
        """Lay the model's weights over the ranks (collective); its names stay."""
        ...

    def make_optimizer(self, policy: PolicyModel, args: TrainingArgs) -> WeightUpdater:
        """Make the optimizer of the trained parameters; moments are those of the last one made."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns a weight in full (collective)."""
        ...

    def moments(self, parameter: nn.Parameter) -> Moments:
        """Returns the moments of a parameter in full (collective); empty before its first update."""
        ...

    def set_moments(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        """Set the moments of a parameter from a checkpoint, in full."""
        ...

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Returns the parameter's shape in full."""
        ...
