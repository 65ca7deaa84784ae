"""Tapered off-policy REINFORCE: full weight for good rows, less weight for unlikely bad rows.

    loss = -A log pi                                       where A > 0
    loss = -sg(clip(pi(row) / mu(row), 0, 1)) A log pi     where A <= 0

pi(row) / mu(row) is the product of the ratios of the row's trained tokens, as in the paper, which
tapers whole trajectories and not tokens. Takes no other correction.

Le Roux et al. 2025, "Tapered Off-Policy REINFORCE", arXiv:2503.14286.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.ratios import summed_log_ratio


def topr(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Tapers rows that become less likely."""
    log_ratios = summed_log_ratio(inputs.learner_logprobs.detach(), inputs.inference_logprobs)
    taper = inputs.rows.sums(log_ratios).clamp(max=0.0).exp().masked_fill(inputs.advantages > 0, 1.0)
    counts = {"tapered_fraction": (taper < 1.0).sum()}
    return LossTerms(-taper * inputs.advantages * inputs.learner_logprobs, counts)


LOSS = Loss(topr, off_policy=True)
