"""PPO's clip, and no gradient on a few of the tokens that spend the most entropy.

    loss = -min(u A, clip(u, 1 - low, 1 + high) A), 0 on the picked tokens

`dapo` except for the picked tokens: the share `cov_fraction` of the mini-batch (by default the
paper's 2e-4), at least one, drawn uniformly from those whose covariance (log pi - mean)(A - mean)
is between `clip_cov_low` and `clip_cov_high` and that keep a gradient under the clip. As in the
paper they are drawn from a band, not the highest ones. Draws depend only on a token's row and
position. One pass of the mini-batch without gradient picks them.

Cui et al. 2025, "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models",
arXiv:2505.22617.
"""

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import BatchTokens, Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.losses.dapo import clipped
from tailrace_learner.core.algorithms.losses.kl_cov import covariances, num_picked
from tailrace_learner.core.algorithms.ratios import BOUND

SHARE = 2e-4  # of the paper


def clip_cov(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Removes the gradient of the picked tokens."""
    assert inputs.is_picked is not None
    terms = clipped(inputs, config.pg_clip, config.pg_clip_high)
    counts = terms.counts | {"cov_picked_fraction": inputs.is_picked.sum()}
    return LossTerms(terms.per_token * (1.0 - inputs.is_picked), counts)


def pick_clip_cov(tokens: BatchTokens, config: LearnerConfig) -> NDArray[np.bool_]:
    """Picks the tokens [N] that lose their gradient."""
    covariance = covariances(tokens)
    log_ratio = tokens.learner_logprobs - tokens.proximal_logprobs
    ratio = np.exp(log_ratio.clip(-BOUND, BOUND))
    bounded = ratio.clip(1.0 - config.pg_clip, 1.0 + config.pg_clip_high)
    is_followed = bounded * tokens.advantages >= ratio * tokens.advantages
    in_band = (covariance > config.clip_cov_low) & (covariance < config.clip_cov_high)
    candidates = np.flatnonzero(in_band & is_followed)
    drawn = candidates[np.argsort(tokens.draws[candidates], kind="stable")]
    picked = np.zeros(len(covariance), np.bool_)
    picked[drawn[: num_picked(len(covariance), config, SHARE)]] = True
    return picked


LOSS = Loss(
    clip_cov,
    reads=("pg_clip", "pg_clip_high", "cov_fraction", "clip_cov_low", "clip_cov_high"),
    selects=pick_clip_cov,
)
