"""Policy gradient without a ratio.

    loss = -A log pi

Its gradient is that of `ppo_clip` at pi = pi_old, which is right for one update per step.

Sutton et al. 1999, "Policy Gradient Methods for Reinforcement Learning with Function Approximation".
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms


def vanilla_pg(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Raises tokens that were better than expected, and lowers those that were worse."""
    return LossTerms(-inputs.advantages * inputs.learner_logprobs)


LOSS = Loss(vanilla_pg)
