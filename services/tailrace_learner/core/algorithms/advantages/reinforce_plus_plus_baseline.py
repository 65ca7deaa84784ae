"""`reinforce_plus_plus` with the group's mean return removed first.

    r'_T = r_T - mean_g,  A_t = whitened over the step: sum over s >= t of gamma^(s - t) r'_s

The mean over the valid members of group g is subtracted from the reward at the end of each turn
sequence, or from the return of each turn of a message tree. Group statistics do not scale: one
deviation, the step's, holds for all groups.

With `init_kl_coef` the divergence from the reference is in the loss; the paper's variant takes
`kl_estimator: k2` for it. With `kl_in: reward` it is in the reward of every token, as in
`reinforce_plus_plus`, after the baseline was removed. A group of equal returns is skipped either way.

Hu et al. 2025, "REINFORCE++", arXiv:2501.03262, variant "with baseline".
"""

from dataclasses import replace

import numpy as np

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Estimator
from tailrace_learner.core.algorithms.advantages.base import (
    NO_REWARD,
    Advantages,
    Returns,
    Verdict,
    nothing,
)
from tailrace_learner.core.algorithms.advantages.comparison import ComparisonSet, baselines_of
from tailrace_learner.core.algorithms.advantages.reinforce import reinforce
from tailrace_learner.core.algorithms.advantages.terminal_reward import reduced


def reinforce_plus_plus_baseline(returns: Returns, config: LearnerConfig) -> Advantages:
    """Computes the return-to-go of returns less their group's mean."""
    found = baselines_of(returns, _mean)
    if found.verdict is not Verdict.TRAIN:
        return nothing(returns, found.verdict)
    compared = tuple(
        np.where(has_signal, conversations, NO_REWARD)
        for conversations, has_signal in zip(returns.row_conversations, found.has_signal, strict=True)
    )
    result = reinforce(replace(reduced(returns, found.baselines), conversations=compared), config)
    return replace(result, has_signal=found.has_signal)


ESTIMATOR = Estimator(
    reinforce_plus_plus_baseline,
    reads=("gamma",),
    compares_group=True,
    token_rewards=True,
    whitens=True,
)


def _mean(comparison: ComparisonSet) -> tuple[float, float]:
    return float(comparison.returns.mean()), 1.0
