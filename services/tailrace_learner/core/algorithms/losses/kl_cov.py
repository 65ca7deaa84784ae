"""Policy gradient with a divergence penalty on the tokens that spend the most entropy.

    loss = -u A                                    u = exp(log pi - log pi_old)
    loss = -u A + beta |log pi - log pi_old|       on the picked tokens

The picked tokens are the share `cov_fraction` of the mini-batch, at least one, with the highest
covariance (log pi - mean)(A - mean). The default share is 2e-3, the paper's value for 7B models; its
value for 32B is 2e-4. beta is `kl_cov_coef`. There is no clip. One pass of the mini-batch without
gradient picks them.

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
arXiv:2505.22617.
"""

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import BatchTokens, Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.ratios import BOUND, held_log_ratio, log_ratio

SHARE = 2e-3  # of the paper


def kl_cov(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Penalises the picked tokens for moving."""
    assert inputs.is_picked is not None
    pair = inputs.learner_logprobs, inputs.proximal_logprobs
    penalty = config.kl_cov_coef * inputs.is_picked * held_log_ratio(*pair).abs()
    per_token = -log_ratio(*pair).exp() * inputs.advantages + penalty
    return LossTerms(per_token, {"cov_picked_fraction": inputs.is_picked.sum()})


def pick_kl_cov(tokens: BatchTokens, config: LearnerConfig) -> NDArray[np.bool_]:
    """Picks the tokens [N] of highest covariance; the draws decide between equals."""
    order = np.lexsort((tokens.draws, -covariances(tokens)))
    picked = np.zeros(len(order), np.bool_)
    picked[order[: num_picked(len(order), config, SHARE)]] = True
    return picked


LOSS = Loss(kl_cov, reads=("cov_fraction", "kl_cov_coef"), selects=pick_kl_cov)


def covariances(tokens: BatchTokens) -> NDArray[np.float64]:
    """Contribution of each token to the covariance of log-probability and advantage, [N]."""
    learner_logprobs = np.maximum(tokens.learner_logprobs, -BOUND)  # one token does not move the mean
    deviations = learner_logprobs - learner_logprobs.mean()
    result: NDArray[np.float64] = deviations * (tokens.advantages - tokens.advantages.mean())
    return result


def num_picked(num_tokens: int, config: LearnerConfig, papers_share: float) -> int:
    """Number of the mini-batch's tokens that the loss treats differently."""
    share = papers_share if config.cov_fraction is None else config.cov_fraction
    return max(int(num_tokens * share), 1)
