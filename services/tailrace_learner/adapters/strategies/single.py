"""`single`: one process holds weights, gradients and optimizer."""

from collections.abc import Mapping

from torch import Tensor, nn

from tailrace_learner.adapters.strategies.base import Moments
from tailrace_learner.config_models import TrainingArgs
from tailrace_learner.core.batch.ranks import ONE_RANK
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.ports import Ranks


class SingleStrategy:
    """One process without collectives."""

    ranks: Ranks = ONE_RANK
    world: Ranks = ONE_RANK

    def spread(self, policy: PolicyModel) -> PolicyModel:
        """Return the policy unchanged."""
        return policy

    def make_optimizer(self, policy: PolicyModel, args: TrainingArgs) -> SummedOptimizer:
        """Make the optimizer of the whole weights."""
        self._optimizer = SummedOptimizer.of(policy.parameters, args)
        return self._optimizer

    def whole(self, tensor: Tensor) -> Tensor:
        """Returns the weight."""
        return tensor.detach()

    def moments(self, parameter: nn.Parameter) -> Moments:
        """Returns the moments."""
        return self._optimizer.moments(parameter)

    def set_moments(self, parameter: nn.Parameter, moments: Mapping[str, Tensor]) -> None:
        """Set the moments, on the parameter's device."""
        device = parameter.device
        on_device = {name: value.to(device) for name, value in moments.items()}
        self._optimizer.set_moments(parameter, on_device)

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Returns the parameter's shape."""
        return tuple(parameter.shape)
