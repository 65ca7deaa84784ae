"""The greedy rollout of the same prompt as baseline.

    A_ij = R_ij - R_greedy

One member of the group is played at temperature 0 (`agents.greedy_baseline`); it is the baseline and
is not trained. A group teaches nothing without it, or where every other member's return equals its; so
does a conversation of which it has none in the same place.

Li et al. 2023, "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning
Large Language Models", arXiv:2310.10505.
"""

from __future__ import annotations

import numpy as np

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Estimator
from tailrace_learner.core.algorithms.advantages.base import Advantages, Returns, Verdict, nothing
from tailrace_learner.core.algorithms.advantages.comparison import ComparisonSet, compared


def remax(returns: Returns, config: LearnerConfig) -> Advantages:
    """Compare valid members with the greedy one, whose own advantage is 0."""
    greedy = returns.greedy
    if greedy < 0 or not returns.is_valid[greedy]:
        return nothing(returns, Verdict.TOO_FEW_VALID)

    def statistic(comparison: ComparisonSet) -> tuple[float, float]:
        baseline = comparison.returns[comparison.members == greedy]
        is_like = len(np.unique(comparison.conversations)) == 1 and len(baseline)
        return (float(baseline[0]), 1.0) if is_like else (0.0, np.inf)

    result = compared(returns, statistic)
    rows = tuple(np.zeros_like(row) for row in result.per_token[greedy])
    per_token = (*result.per_token[:greedy], rows, *result.per_token[greedy + 1 :])
    return Advantages(per_token, result.verdict)


ESTIMATOR = Estimator(remax, compares_group=True, needs_greedy=True)
