"""The baseline of least variance under on-policy sampling: longer episodes count more.

    A_ij = R_ij - (sum_k l_k R_k) / (sum_k l_k)      over the valid members k of group g

l_k is the number of policy tokens of episode k, over all of its rows. As `grpo` without the division
and with weights in the mean.

Hao et al. 2025, "On-Policy RL with Optimal Reward Baseline", arXiv:2505.23585.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Estimator
from tailrace_learner.core.algorithms.advantages.base import Advantages, Returns
from tailrace_learner.core.algorithms.advantages.comparison import ComparisonSet, compared


def opo(returns: Returns, config: LearnerConfig) -> Advantages:
    """Compares valid members with their length-weighted mean."""
    return compared(returns, _weighted)


ESTIMATOR = Estimator(opo, compares_group=True)


def _weighted(comparison: ComparisonSet) -> tuple[float, float]:
    num_tokens = max(
        int(comparison.num_tokens.sum()), 1
    )  # rows without a policy token have no advantage
    return float(comparison.num_tokens @ comparison.returns) / num_tokens, 1.0
