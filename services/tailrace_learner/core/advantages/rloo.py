"""Leave-one-out baseline.

    A_ij = R_ij - mean of R_k over the other valid members k of group g

As `grpo` without the division, but a member is not part of its own baseline, which makes the
baseline independent of it: A is n / (n - 1) times R - mean_g for episodes of one row.

Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization", arXiv:2402.14740.
"""

from __future__ import annotations

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.advantages.base import (
    Advantages,
    Returns,
    Verdict,
    compared,
    group_verdict,
    nothing,
)


def rloo(returns: Returns, config: LearnerConfig) -> Advantages:
    """Compare each valid member with the others."""
    verdict = group_verdict(returns)
    if verdict is not Verdict.TRAIN:
        return nothing(returns, verdict)
    valid = returns.rewards[returns.is_valid]
    others = (valid.sum() - returns.rewards) / (len(valid) - 1)
    return compared(returns, others, 1.0)
