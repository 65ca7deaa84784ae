"""The baseline of least variance under on-policy sampling: longer episodes count more.

    A_ij = R_ij - (sum_k l_k R_k) / (sum_k l_k)      over the valid members k of group g

l_k is the number of policy tokens of episode k, over all of its rows. As `grpo` without the division
and with weights in the mean.

Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585.
"""

from __future__ import annotations

import numpy as np

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.advantages.base import (
    Advantages,
    Returns,
    Verdict,
    compared,
    group_verdict,
    nothing,
)


def opo(returns: Returns, config: LearnerConfig) -> Advantages:
    """Compare valid members with their length-weighted mean."""
    verdict = group_verdict(returns)
    if verdict is not Verdict.TRAIN:
        return nothing(returns, verdict)
    lengths = np.array([sum(np.count_nonzero(mask) for mask in masks) for masks in returns.loss_masks])
    valid = returns.is_valid
    baseline = float(lengths[valid] @ returns.rewards[valid]) / float(lengths[valid].sum())
    return compared(returns, np.full(len(returns.rewards), baseline), 1.0)
