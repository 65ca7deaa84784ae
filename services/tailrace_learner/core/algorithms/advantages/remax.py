"""The greedy rollout of the same prompt as baseline.

    A_ij = R_ij - R_greedy

One member of the group is played at temperature 0 (`agents.greedy_baseline`). It is the baseline and
is not trained. A group has no learning signal without this member, or if every other return equals
its return. A conversation has none if the greedy member has no conversation of its number.

Li et al. 2023, "ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning
Large Language Models", arXiv:2310.10505.
"""

from dataclasses import replace

import numpy as np

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Estimator
from tailrace_learner.core.algorithms.advantages.base import Advantages, Returns, Verdict, nothing
from tailrace_learner.core.algorithms.advantages.comparison import ComparisonSet, compared


def remax(returns: Returns, config: LearnerConfig) -> Advantages:
    """Compares valid members with the greedy one, whose own advantage is 0."""
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
    return replace(result, per_token=per_token)


ESTIMATOR = Estimator(remax, compares_group=True, needs_greedy=True)
