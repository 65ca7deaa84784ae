"""`single`: one process holds weights, gradients and optimizer."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from tailrace_learner.adapters.strategies.base import Moments
from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.core.batch.ranks import ONE_RANK
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedAdamW, make_adamw
from tailrace_learner.ports import Ranks


class SingleStrategy:
    """Everything as torch makes it."""

    ranks: Ranks = ONE_RANK
    world: Ranks = ONE_RANK

    def spread(self, policy: PolicyModel) -> PolicyModel:
        """The policy as it is."""
        return policy

    def make_optimizer(self, policy: PolicyModel, args: TrainingArgs) -> SummedAdamW:
        """AdamW in one kernel."""
        self._optimizer = make_adamw(policy.parameters, args)
        return self._optimizer

    def whole(self, tensor: Tensor) -> Tensor:
        """The weight itself."""
        return tensor.detach()

    def moments(self, parameter: nn.Parameter) -> Moments:
        """The moments themselves."""
        return dict(self._optimizer.state.get(parameter, {}))

    def set_moments(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        """Put the moments on the parameter's device."""
        device = parameter.device
        self._optimizer.state[parameter] = {name: value.to(device) for name, value in moments.items()}

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The parameter's shape."""
        return tuple(parameter.shape)
