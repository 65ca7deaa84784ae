"""Group-relative advantages.

    A_ij = (R_ij - mean_g) / (std_g + 1e-6)

R_ij is the return credited to row j of member i: the member's own return R_i if it has one row.
Mean and standard deviation (ddof 1) are taken over the returns R_i of the valid members of group g: a
member counts once for any number of rows. All policy tokens of a row have the same advantage. If
members have several conversations with their own rewards, conversations of the same number are
compared with each other; rows of a conversation without a reward have advantage 0.

If all valid members have the same return, the group has no learning signal, even if the rows of a
member have different credit (turn discounts): such differences measure the position of a turn, not its
quality, and a standard deviation near 0 would make them huge. Returns that differ only by rounding are
equal.

GRPO: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300. Without the division (`norm_std: false`):
Dr. GRPO, Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Estimator
from tailrace_learner.core.algorithms.advantages.base import STD_EPSILON, Advantages, Returns
from tailrace_learner.core.algorithms.advantages.comparison import ComparisonSet, compared


def grpo(returns: Returns, config: LearnerConfig) -> Advantages:
    """Compares the rows of valid members with their group."""

    def statistic(comparison: ComparisonSet) -> tuple[float, float]:
        scale = float(comparison.returns.std(ddof=1)) + STD_EPSILON if config.norm_std else 1.0
        return float(comparison.returns.mean()), scale

    return compared(returns, statistic)


ESTIMATOR = Estimator(grpo, reads=("norm_std",), compares_group=True)
