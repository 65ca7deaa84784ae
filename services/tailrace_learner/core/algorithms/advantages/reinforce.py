"""Discounted return-to-go of per-token rewards.

    A_t = sum over s >= t of gamma^(s - t) r_s

Time counts policy tokens only: what the environment said in between is not discounted through. A
turn's reward lies on its last policy token. Where turns belong to a message tree (conversations of
agent loops and workflows), what comes after a turn is discounted by `turn_discount` alone: its whole
return lies on its last policy token, as if it were a row of its own. With `kl_in: reward` every policy
token also has the reward -beta KL_t, its divergence from the reference. No baseline:
`whiten_advantages` gives one.

Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
Learning".
"""

from __future__ import annotations

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Estimator
from tailrace_learner.core.algorithms.advantages.base import Advantages, Returns, Verdict, nothing
from tailrace_learner.core.algorithms.advantages.turn_sequences import (
    discounted,
    per_token,
    turn_sequences,
)


def reinforce(returns: Returns, config: LearnerConfig) -> Advantages:
    """Give every policy token what came after it."""
    if not returns.is_valid.any():
        return nothing(returns, Verdict.TOO_FEW_VALID)
    found = turn_sequences(returns)
    values = [discounted(sequence.rewards_of_tokens(config.gamma), config.gamma) for sequence in found]
    return Advantages(per_token(found, values, returns), Verdict.TRAIN)


ESTIMATOR = Estimator(reinforce, reads=("gamma",), token_rewards=True)
