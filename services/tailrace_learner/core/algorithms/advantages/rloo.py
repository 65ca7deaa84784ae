"""Leave-one-out baseline.

    A_ij = R_ij - mean of R_k over the other valid members k of group g

As `grpo` without the division, but a member is not part of its own baseline, so the baseline is
independent of the member: A is n / (n - 1) times R - mean_g for episodes of one row.

Ahmadian et al. 2024, "Back to Basics: Revisiting REINFORCE Style Optimization", arXiv:2402.14740.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Estimator
from tailrace_learner.core.algorithms.advantages.base import Advantages, Float64Array, Returns
from tailrace_learner.core.algorithms.advantages.comparison import ComparisonSet, compared


def rloo(returns: Returns, config: LearnerConfig) -> Advantages:
    """Compares each valid member with the others."""
    return compared(returns, _others)


ESTIMATOR = Estimator(rloo, compares_group=True)


def _others(comparison: ComparisonSet) -> tuple[Float64Array, float]:
    return (comparison.returns.sum() - comparison.returns) / (len(comparison.returns) - 1), 1.0
