"""Trajectory-wise advantages of multi-turn episodes.

    A_ij = norm(R_ij),  R_i = sum of the turn rewards of episode i

`reward_grouping` chooses the episodes that share mean and standard deviation (ddof 1): those of the
group (`traj_group_id`), those of one tag in the step (`tags`), or all of the step (`batch`).
`reward_norm` chooses the normalization: `mean_std` is (R - mean) / (std + 1e-6), `mean` is R - mean,
`none` is R. All policy tokens of a row have the same advantage. `advantage_clip` and
`whiten_advantages` apply after it. Within groups and with `mean_std` it equals `grpo`.

Wang et al. 2025, "RAGEN: Understanding Self-Evolution in LLM Agents via Multi-Turn Reinforcement
Learning", arXiv:2504.20073.
"""

import numpy as np

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Estimator
from tailrace_learner.core.algorithms.advantages.base import (
    STD_EPSILON,
    Advantages,
    Float64Array,
    Returns,
    Verdict,
    are_equal,
    nothing,
)
from tailrace_learner.core.algorithms.advantages.comparison import compared, uncompared


def starpo(returns: Returns, config: LearnerConfig) -> Advantages:
    """Normalises within the group, or leaves returns to the comparison beyond it."""
    if not returns.is_valid.any():
        return nothing(returns, Verdict.TOO_FEW_VALID)
    if not _compares_group(config):
        return uncompared(returns)
    return compared(returns, lambda comparison: statistics(comparison.returns, config))


def statistics(pool: Float64Array, config: LearnerConfig) -> tuple[float, float]:
    """Mean and scale for returns [n] that are compared with each other.

    An infinite scale marks a comparison without a learning signal: one episode, or all equal.
    """
    if len(pool) < 2 or are_equal(pool):
        return 0.0, np.inf
    scale = float(pool.std(ddof=1)) + STD_EPSILON if config.reward_norm == "mean_std" else 1.0
    return float(pool.mean()), scale


def _compares_group(config: LearnerConfig) -> bool:
    return config.reward_norm != "none" and config.reward_grouping == "traj_group_id"


def _compares_step(config: LearnerConfig) -> bool:
    return config.reward_norm != "none" and config.reward_grouping != "traj_group_id"


ESTIMATOR = Estimator(
    starpo,
    reads=("reward_grouping", "reward_norm"),
    compares_group=_compares_group,
    compares_step=_compares_step,
    step_statistic=statistics,
)
