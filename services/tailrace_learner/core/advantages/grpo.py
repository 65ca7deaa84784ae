"""Group-relative advantages.

    A_i = (R_i - mean_g) / (std_g + 1e-6)

over the valid members of a group g, `std` with ddof 1, the same on every policy token of member i.
GRPO: Shao et al. 2024, "DeepSeekMath", arXiv:2402.03300. Without the division (`norm_std: false`):
Dr. GRPO, Liu et al. 2025, "Understanding R1-Zero-Like Training", arXiv:2503.20783.
"""

from __future__ import annotations

import numpy as np

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.advantages.base import Advantages, Returns, Verdict, broadcast

STD_EPSILON = 1e-6


def grpo(returns: Returns, config: LearnerConfig) -> Advantages:
    """Compare each valid member with its group; fewer than two, or all equal, teach nothing."""
    values = np.zeros(len(returns.rewards))
    valid = returns.rewards[returns.is_valid]
    if len(valid) < 2:
        return Advantages(broadcast(values, returns), Verdict.TOO_FEW_VALID)
    if valid.min() == valid.max():
        return Advantages(broadcast(values, returns), Verdict.ZERO_VARIANCE)
    scale = valid.std(ddof=1) + STD_EPSILON if config.norm_std else 1.0
    values[returns.is_valid] = (valid - valid.mean()) / scale
    return Advantages(broadcast(values, returns), Verdict.TRAIN)
