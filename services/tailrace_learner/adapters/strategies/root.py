"""A root module whose forward contains all work with a model, for strategies that gather weights by
hooks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from tailrace_learner.core.batch.packing import PackedBatch
from tailrace_learner.core.model.policy import PolicyModel

T = TypeVar("T")


class Root(nn.Module):
    """Wrapper of the model; its forward runs work that needs the gathered weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        """Run `work` and return its result."""
        return work()


@dataclass(frozen=True, slots=True)
class RootedPolicy(PolicyModel):
    """Policy whose weights are gathered while its root computes."""

    root: Any = None

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities [M] and entropies [M] of the batch's targets, in packed order."""
        learner_logprobs, entropy = self.root(lambda: PolicyModel.forward(self, batch))
        return learner_logprobs, entropy
