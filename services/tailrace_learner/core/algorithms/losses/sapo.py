"""A soft gate in place of the clip.

    loss = -(4 / tau) sigmoid(tau (u - 1)) A,  u = exp(log pi - log pi_old)

tau is `sapo_tau` where A > 0 and `sapo_tau_negative` elsewhere. At u = 1 the gradient is that of
`ppo_clip`; it decreases smoothly on both sides, faster for tokens with negative advantage.

Gao et al. 2025, "Soft Adaptive Policy Optimization", arXiv:2511.20347.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.ratios import log_ratio


def sapo(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Gates each token by the distance of its ratio from 1."""
    ratio = log_ratio(inputs.learner_logprobs, inputs.proximal_logprobs).exp()
    tau = ratio.new_full(ratio.shape, config.sapo_tau_negative)
    tau = tau.masked_fill(inputs.advantages > 0, config.sapo_tau)
    return LossTerms(-4.0 / tau * (tau * (ratio - 1.0)).sigmoid() * inputs.advantages)


LOSS = Loss(sapo, reads=("sapo_tau", "sapo_tau_negative"))
