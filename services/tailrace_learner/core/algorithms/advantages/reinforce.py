"""Discounted return-to-go of per-token rewards.

    A_t = sum over s >= t of gamma^(s - t) r_s

Time counts policy tokens only: tokens of the environment between them are not discounted. A turn's
reward is on its last policy token. If turns belong to a message tree (conversations of agent loops
and workflows), `turn_discount` alone discounts the rewards after a turn: its whole return is on its
last policy token, as in a separate row. With `kl_in: reward` every policy token also has
the reward -beta KL_t, its divergence from the reference. There is no baseline; `whiten_advantages`
gives one.

Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
Learning".
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Estimator
from tailrace_learner.core.algorithms.advantages.base import Advantages, Returns, Verdict, nothing
from tailrace_learner.core.algorithms.advantages.turn_sequences import (
    discounted,
    per_token,
    turn_sequences,
)


def reinforce(returns: Returns, config: LearnerConfig) -> Advantages:
    """Gives every policy token the discounted rewards from it on."""
    if not returns.is_valid.any():
        return nothing(returns, Verdict.TOO_FEW_VALID)
    found = turn_sequences(returns)
    values = [discounted(sequence.rewards_of_tokens(config.gamma), config.gamma) for sequence in found]
    return Advantages(per_token(found, values, returns), Verdict.TRAIN)


ESTIMATOR = Estimator(reinforce, reads=("gamma",), token_rewards=True)
