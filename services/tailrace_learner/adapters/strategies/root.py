"""One forward around all that a policy does with its model, for what gathers weights by hooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from tailrace_learner.core.batch.packing import PackedBatch
from tailrace_learner.core.model.policy import PolicyModel

T = TypeVar("T")


class Root(nn.Module):
    """Around the model; its forward is whatever is to happen with the model's weights at hand."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], T]) -> T:
        """The result of `work`."""
        return work()


@dataclass(frozen=True, slots=True)
class RootedPolicy(PolicyModel):
    """A policy whose weights are there while its root computes."""

    root: Any = None

    def forward(self, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """log pi [M] and entropy [M] of the batch's targets, in packed order."""
        learner_logprobs, entropy = self.root(lambda: PolicyModel.forward(self, batch))
        return learner_logprobs, entropy
