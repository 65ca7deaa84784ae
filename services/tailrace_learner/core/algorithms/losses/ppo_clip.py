"""PPO's clipped policy gradient: `dapo` with the same bound on both sides.

    loss = -min(u A, clip(u, 1 - eps, 1 + eps) A)

Schulman et al. 2017, "Proximal Policy Optimization Algorithms", arXiv:1707.06347.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.losses.dapo import clipped


def ppo_clip(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Clips to 1 ± `pg_clip`."""
    return clipped(inputs, config.pg_clip, config.pg_clip, config.dual_clip)


LOSS = Loss(ppo_clip, reads=("pg_clip", "dual_clip"))
