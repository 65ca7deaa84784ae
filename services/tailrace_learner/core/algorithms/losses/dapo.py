"""Clipped policy gradient with separate bounds ("clip-higher").

    u = exp(log pi - log pi_old)
    loss = -min(u A, clip(u, 1 - low, 1 + high) A)
    loss = -max(min(u A, clip(u, 1 - low, 1 + high) A), c A) where A < 0 and `dual_clip` c is set

Yu et al. 2025, "DAPO", arXiv:2503.14476. A larger `high` lets unlikely good tokens grow. The dual clip
bounds the loss of unlikely bad tokens: Ye et al. 2019, "Mastering Complex Control in MOBA Games with
Deep Reinforcement Learning", arXiv:1912.09729.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.ratios import log_ratio

if TYPE_CHECKING:
    from torch import Tensor


def dapo(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Clips below 1 - `pg_clip` and above 1 + `pg_clip_high`."""
    return clipped(inputs, config.pg_clip, config.pg_clip_high, config.dual_clip)


LOSS = Loss(dapo, reads=("pg_clip", "pg_clip_high", "dual_clip"))


def clipped(inputs: LossInputs, low: float, high: float, dual: float = 0.0) -> LossTerms:
    """Clipped loss with given bounds; counts tokens whose gradient a clip removed."""
    ratio = log_ratio(inputs.learner_logprobs, inputs.proximal_logprobs).exp()
    terms = clip_ratio(ratio, inputs.advantages, low, high)
    if not dual:
        return terms
    bound = -dual * inputs.advantages
    is_bound = (inputs.advantages < 0) & (terms.per_token > bound)
    per_token = bound.where(is_bound, terms.per_token)
    return LossTerms(per_token, terms.counts | {"dual_clip_fraction": is_bound.sum()})


def clip_ratio(ratio: Tensor, advantages: Tensor, low: float, high: float) -> LossTerms:
    """Computes -min(ratio A, clip(ratio, 1 - low, 1 + high) A) for ratios [M] of any kind."""
    straight = ratio * advantages
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * advantages
    is_clipped = (bounded < straight).sum()
    return LossTerms(-straight.minimum(bounded), {"clip_fraction": is_clipped})
