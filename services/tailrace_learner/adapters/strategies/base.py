"""Interface of a strategy, whose methods as they stand are those of `single`: one process holds all.

All ranks must call a method marked as collective, in the same order.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from torch import Tensor, nn

from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.core.batch.packing import PackedBatch
from tailrace_learner.core.batch.ranks import ONE_RANK
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.ports import Ranks, WeightUpdater

T = TypeVar("T")
Moments = dict[str, Tensor]


class Strategy:
    """Lays one model and its optimizer over the ranks."""

    ranks: Ranks = ONE_RANK  # that share the rows of a step; several processes may count as one
    world: Ranks = ONE_RANK  # all processes
    cuts_rows: bool = False  # weights are cut along their first dimension, over all processes
    _optimizer: SummedOptimizer

    def spread(self, policy: PolicyModel) -> PolicyModel:
        """Lay the model's weights over the ranks (collective); its names stay.

        Every rank must have loaded the same weights.
        """
        return policy

    def make_optimizer(self, policy: PolicyModel, args: TrainingArgs) -> WeightUpdater:
        """Make the optimizer of the trained parameters; moments are those of the last one made."""
        self._optimizer = SummedOptimizer.of(policy.parameters, args)
        return self._optimizer

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns a weight in full (collective)."""
        return self._gathered(tensor.detach(), tensor)

    def moments(self, parameter: nn.Parameter) -> Moments:
        """Returns the moments of a parameter in full (collective); empty before its first update."""
        found = self._optimizer.moments(parameter)
        return {name: self._gathered(value, parameter) for name, value in found.items()}

    def set_moments(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        """Set the moments of a parameter from a checkpoint, in full; all ranks share scalars."""
        parts = {
            name: (self._part(value, parameter) if value.dim() else value).to(parameter.device)
            for name, value in moments.items()
        }
        self._optimizer.set_moments(parameter, parts)

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Returns the parameter's shape in full."""
        return tuple(parameter.shape)

    def _gathered(self, tensor: Tensor, like: Tensor) -> Tensor:
        """All ranks' parts of a tensor that is cut like a weight, or a scalar (collective)."""
        return tensor

    def _part(self, tensor: Tensor, like: nn.Parameter) -> Tensor:
        """This rank's part of a tensor that is to be cut like a parameter."""
        return tensor


class Root(nn.Module):
    """Wrapper of a model for strategies that gather weights by hooks: its forward contains all work."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        """Run `work`, which needs the gathered weights, and return its result."""
        return work()


@dataclass(frozen=True, slots=True)
class RootedPolicy(PolicyModel):
    """Policy whose weights are gathered while its root computes."""

    root: Any = None

    @classmethod
    def of(cls, policy: PolicyModel, root: Any) -> Self:
        """The policy with a root."""
        given = {field.name: getattr(policy, field.name) for field in fields(PolicyModel)}
        return cls(**given, root=root)

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities [M] and entropies [M] of the batch's targets, in packed order."""
        learner_logprobs, entropy = self.root(lambda: PolicyModel.forward(self, batch))
        return learner_logprobs, entropy
