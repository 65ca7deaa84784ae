"""A trust region on the change of probability instead of the ratio.

    loss = -sg(keep) exp(log pi - log mu) A + tau (log pi - log mu)^2
    keep = 0 where A > 0 and pi - mu > delta, or A < 0 and mu - pi > delta; else 1

|pi - mu| of the sampled token is a lower bound of the total variation between the policies. A bound
on the ratio instead restricts unlikely tokens, which hardly matter, and lets likely ones move far.
delta is `dppo_delta`. The paper has no divergence term, so tau = `dppo_kl_coef` is 0 by default;
above 0 it keeps the policy near the one that sampled. Takes no other correction.

Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv:2602.04879.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Loss
from tailrace_learner.core.algorithms.losses.base import LossInputs, LossTerms


def dppo_tv(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Follows tokens until their probability has changed by delta."""
    difference = inputs.learner_logprobs - inputs.inference_logprobs
    change = inputs.learner_logprobs.detach().exp() - inputs.inference_logprobs.exp()
    is_dropped = inputs.advantages.sign() * change > config.dppo_delta
    gradient = (difference.exp() * inputs.advantages).masked_fill(is_dropped, 0.0)
    return LossTerms(
        -gradient + config.dppo_kl_coef * difference**2, {"tv_masked_fraction": is_dropped.sum()}
    )


LOSS = Loss(dppo_tv, reads=("dppo_delta", "dppo_kl_coef"), off_policy=True)
