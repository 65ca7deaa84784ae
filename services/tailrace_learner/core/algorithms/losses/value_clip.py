"""The critic's loss, clipped around the values at the start of the step.

    loss = 1/2 max((V - target)^2, (clip(V, V_old - eps, V_old + eps) - target)^2)

eps is `critic.value_clip`; 0 leaves (V - target)^2 / 2. Targets come from `gae`. It is aggregated
like the policy's loss (`loss_aggregation`), on the same trained tokens and mini-batches. In the first
`critic.critic_warmup` steps only the critic is trained.

Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347, and its authors'
code.
"""

import torch
from torch import Tensor

from tailrace_learner.core.algorithms.losses.base import LossTerms


def value_clip(values: Tensor, old_values: Tensor, targets: Tensor, clip: float) -> LossTerms:
    """Computes the loss [M] of values [M]; counts those whose gradient the clip removed."""
    bounded = torch.clamp(values, old_values - clip, old_values + clip)
    straight, clipped = (values - targets) ** 2, (bounded - targets) ** 2
    counts = {"value_clip_fraction": (clipped > straight).sum()}
    return LossTerms(0.5 * torch.maximum(straight, clipped), counts)
