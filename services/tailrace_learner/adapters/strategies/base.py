"""What every strategy offers. Methods that say so are collectives: all ranks must call them, in one
order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn

from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.ports import Ranks, WeightUpdater

Moments = dict[str, Tensor]


class Strategy(Protocol):
    """One model with its optimizer, as it lies on this rank and the others."""

    ranks: Ranks  # that share the rows of a step; several processes may count as one
    world: Ranks  # all processes

    def spread(self, policy: PolicyModel) -> PolicyModel:
        """Lay the model's weights over the ranks (collective); its names stay."""
        ...

    def make_optimizer(self, policy: PolicyModel, args: TrainingArgs) -> WeightUpdater:
        """AdamW of the trained parameters, laid out as they are; moments are those of the last made."""
        ...

    def whole(self, tensor: Tensor) -> Tensor:
        """A weight in full (collective)."""
        ...

    def moments(self, parameter: nn.Parameter) -> Moments:
        """AdamW's moments of a parameter in full (collective); empty before its first update."""
        ...

    def set_moments(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        """Give a parameter the moments that a checkpoint holds, in full."""
        ...

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The parameter's shape in full."""
        ...
