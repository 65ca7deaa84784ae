"""The critic: values of the tokens before each policy token.

A trunk (a model of its own, or the policy's) and a linear head on the hidden state that predicts the
token. The head begins at 0, so the values of a new critic are 0. Values are float32.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tailrace_learner.config import CriticArgs
from tailrace_learner.core.batch.packing import PackedBatch
from tailrace_learner.core.model.policy import PolicyModel


def make_head(hidden_size: int, device: torch.device) -> nn.Linear:
    """Makes a head whose values are 0."""
    head = nn.Linear(hidden_size, 1, device=device)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


@dataclass(frozen=True, slots=True)
class Critic:
    """`trunk` needs no output matrix unless it is the policy."""

    trunk: PolicyModel
    head: nn.Linear
    args: CriticArgs = field(default_factory=CriticArgs)

    @property
    def parameters(self) -> list[nn.Parameter]:
        """Parameters that the critic's own optimizer trains."""
        trunk = [] if self.args.shared else self.trunk.parameters
        return [*trunk, *self.head.parameters()]

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The same as `parameters`, by the names that checkpoints use."""
        found = {f"head.{name}": parameter for name, parameter in self.head.named_parameters()}
        if not self.args.shared:
            trunk = self.trunk.model.named_parameters()
            found |= {f"trunk.{name}": parameter for name, parameter in trunk}
        return found

    def values(self, batch: PackedBatch) -> Tensor:
        """V [M] of the batch's targets, in packed order."""
        return self.read(self.trunk.hidden(batch))

    def read(self, hidden: Tensor) -> Tensor:
        """V [M] from hidden states [M, H]; `value_loss_coef` of the gradient reaches a shared trunk."""
        if self.args.shared:
            share = self.args.value_loss_coef
            hidden = share * hidden + (1.0 - share) * hidden.detach()
        values: Tensor = self.head(hidden.float())
        return values.squeeze(-1)
