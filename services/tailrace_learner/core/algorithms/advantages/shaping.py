"""Shaping of returns before any estimator reads them.

1. `reward_clip` c: returns, rows' returns and turn rewards become min(max(R, -c), c), once. A reward at
   an episode's end is added to its last turn's reward before clipping, so no turn's reward exceeds c.
   The sum over several turns may exceed c, and then differs from the clipped return.
2. `overlong_max_tokens` L and `overlong_buffer_tokens` B: an episode of n sampled tokens loses
   min(max(n - (L - B), 0) / B, 1): nothing up to L - B, 1 from L on. The penalty acts before the limit
   cuts an episode off.

Soft overlong punishment: Yu et al. 2025, "DAPO", arXiv:2503.14476, equation 13.
"""

from dataclasses import replace

import numpy as np

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.advantages.base import Returns
from tailrace_learner.core.algorithms.advantages.terminal_reward import clipped, reduced


def shaped(returns: Returns, config: LearnerConfig) -> Returns:
    """Clips and penalises returns; gives the same object when neither is switched on."""
    if config.reward_clip:
        returns = clipped(returns, config.reward_clip)
    if config.overlong_max_tokens:
        returns = _penalised(returns, config)
    return returns


def _penalised(returns: Returns, config: LearnerConfig) -> Returns:
    lengths = np.array([sum(np.count_nonzero(mask) for mask in masks) for masks in returns.loss_masks])
    buffer = config.overlong_buffer_tokens
    over = (lengths - (config.overlong_max_tokens - buffer)) / buffer
    penalties = np.clip(over, 0.0, 1.0)
    of_rows = tuple(
        np.full(len(rewards), penalty)
        for rewards, penalty in zip(returns.row_rewards, penalties, strict=True)
    )
    return replace(reduced(returns, of_rows), rewards=returns.rewards - penalties)
