"""A trust region on the change of probability instead of the ratio.

    loss = -sg(keep) min(pi / mu, C) A + tau (log pi - log mu)^2
    keep = 0 where A > 0 and pi - mu > delta, or A < 0 and mu - pi > delta; else 1

|pi - mu| of the sampled token is a lower bound of the total variation between the policies. A bound
on the ratio instead restricts unlikely tokens, which hardly matter, and lets likely ones move far.
delta is `dppo_delta`. A tiny mu gives a ratio of any size while the probability moves by less than
delta: beyond C = `dppo_cap` the token keeps the gradient of weight C. The paper has no divergence
term, so tau = `dppo_kl_coef` is 0 by default; above 0 it keeps the policy near the one that sampled.
Takes no other correction.

Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.ratios import held_log_ratio, log_ratio


def dppo_tv(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Follows tokens until their probability has changed by delta."""
    current, sampled = inputs.learner_logprobs, inputs.inference_logprobs
    start = current.detach()
    ratio = log_ratio(start, sampled).exp()
    weights = ratio.clamp(max=config.dppo_cap)
    is_dropped = inputs.advantages.sign() * (start.exp() - sampled.exp()) > config.dppo_delta
    follow = weights * (current - start).exp() * inputs.advantages  # its gradient is that of the weight
    penalty = config.dppo_kl_coef * held_log_ratio(current, sampled) ** 2
    return LossTerms(
        penalty - follow.masked_fill(is_dropped, 0.0),
        {
            "tv_masked_fraction": is_dropped.sum(),
            "behaviour_truncated_fraction": (ratio > config.dppo_cap).sum(),
        },
    )


LOSS = Loss(dppo_tv, reads=("dppo_delta", "dppo_cap", "dppo_kl_coef"), off_policy=True)
