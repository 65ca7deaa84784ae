"""Discounted return-to-go of per-token rewards.

    A_t = sum over s >= t of gamma^(s - t) r_s

Time counts policy tokens only: what the environment said in between is not discounted through. A
turn's reward lies on its last policy token. No baseline: `whiten_advantages` gives one.

Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
Learning".
"""

from __future__ import annotations

import numpy as np

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.advantages.base import Advantages, Float64Array, Returns, Verdict, nothing
from tailrace_learner.core.advantages.lines import Line, lines, per_token


def reinforce(returns: Returns, config: LearnerConfig) -> Advantages:
    """Give every policy token what came after it."""
    if not returns.is_valid.any():
        return nothing(returns, Verdict.TOO_FEW_VALID)
    found = lines(returns)
    values = [token_returns(line, config.gamma) for line in found]
    return Advantages(per_token(found, values, returns), Verdict.TRAIN)


def token_returns(line: Line, gamma: float) -> Float64Array:
    """Return-to-go [N] of a line's policy tokens."""
    parts: list[Float64Array] = []
    ahead = 0.0  # what follows the turn, seen from its last token
    for reward, size in zip(line.rewards[::-1], line.num_tokens[::-1], strict=True):
        ahead += float(reward)
        if size:
            parts.append(ahead * gamma ** np.arange(size - 1, -1, -1.0))
            ahead = gamma * float(parts[-1][0])
    return np.concatenate(parts[::-1])
