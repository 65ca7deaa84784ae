"""Policy gradient with truncated importance weights against the policy that sampled.

    loss = -min(rho', C) A log pi,  rho' = sg(pi / mu)

`vanilla_pg` times a weight of the *current* policy, so that it corrects for updates within a step as
well as for staleness. C is `tis_cap`. Takes no other correction.

Ionides 2008, "Truncated Importance Sampling"; Yao et al. 2025, "Your Efficient RL Framework Secretly
Brings You Off-Policy RL Training".
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.ratios import log_ratio


def tis_pg(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Weighs each token by its truncated ratio."""
    ratio = log_ratio(inputs.learner_logprobs.detach(), inputs.inference_logprobs).exp()
    counts = {"behaviour_truncated_fraction": (ratio > config.tis_cap).sum()}
    weights = ratio.clamp(max=config.tis_cap)
    return LossTerms(-weights * inputs.advantages * inputs.learner_logprobs, counts)


LOSS = Loss(tis_pg, reads=("tis_cap",), off_policy=True)
