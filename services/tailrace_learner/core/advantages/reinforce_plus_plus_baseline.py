"""`reinforce_plus_plus` with the group's mean return removed first.

    r'_T = r_T - mean_g,  A_t = whitened over the step: sum over s >= t of gamma^(s - t) r'_s

The mean over the valid members of group g is subtracted from the reward at the end of each line of
turns. Group statistics scale nothing: one deviation, the step's, holds for all groups.

With `init_kl_coef` the divergence from the reference is in the loss; the paper's variant takes
`kl_estimator: k2` for it. With `kl_in: reward` it is in the reward of every token, as in
`reinforce_plus_plus`, after the baseline was removed. A group of equal returns is skipped either way.

Hu et al. 2025, "REINFORCE++", arXiv:2501.03262, variant "with baseline".
"""

from __future__ import annotations

from dataclasses import replace

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.advantages.base import (
    Advantages,
    Returns,
    Verdict,
    group_verdict,
    nothing,
)
from tailrace_learner.core.advantages.reinforce import reinforce


def reinforce_plus_plus_baseline(returns: Returns, config: LearnerConfig) -> Advantages:
    """Return-to-go of returns less their group's mean."""
    verdict = group_verdict(returns)
    if verdict is not Verdict.TRAIN:
        return nothing(returns, verdict)
    mean = returns.rewards[returns.is_valid].mean()
    less = replace(
        returns,
        rewards=returns.rewards - mean,
        row_rewards=tuple(rewards - mean for rewards in returns.row_rewards),
    )
    return reinforce(less, config)
