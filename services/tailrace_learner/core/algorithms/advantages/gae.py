"""Generalised advantage estimation over policy tokens.

    delta_t = r_t + gamma V_(t+1) - V_t,  A_t = delta_t + gamma lambda A_(t+1)

t counts policy tokens, or turns (`gae_unit: turn`). Tokens of the environment between them are skipped:
they have no value and no discount. Rows that are parts of one turn sequence are one sequence. V after
the last step is 0, because episodes end. V_t is the critic's value (`learner.critic`) before token t,
by its weights at the start of the step. A turn's reward is on its last policy token; with
`kl_in: reward` every token also has -beta KL_t. With turns, V of a turn is the value before its first
policy token, r is the sum of its rewards, and all of its tokens have its advantage. The target of the
values is A + V. Rows longer than the critic reads are skipped too: the reward of their turns belongs
to the turn before.

Turns of a message tree (conversations of agent loops and workflows) have a return each, discounted by
`turn_discount`. Their r_t are chosen so that with lambda 1 the target is that return; if nothing forks
and `turn_discount` and gamma are 1, they are the turns' own rewards.

Schulman et al. 2015, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
arXiv:1506.02438; turns: arXiv:2505.11821.
"""

import numpy as np

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Estimator
from tailrace_learner.core.algorithms.advantages.base import (
    Advantages,
    Float64Array,
    Returns,
    Verdict,
    nothing,
)
from tailrace_learner.core.algorithms.advantages.turn_sequences import (
    TurnSequence,
    discounted,
    per_token,
    turn_sequences,
)


def gae(returns: Returns, config: LearnerConfig) -> Advantages:
    """Compares rewards with the critic's values; without values they are 0."""
    if not returns.is_valid.any():
        return nothing(returns, Verdict.TOO_FEW_VALID)
    found = turn_sequences(returns)
    estimate = _by_turn if config.gae_unit == "turn" else _by_token
    pairs = [estimate(sequence, config.gamma, config.lambd) for sequence in found]
    return Advantages(
        per_token(found, [advantages for advantages, _ in pairs], returns),
        Verdict.TRAIN,
        per_token(found, [targets for _, targets in pairs], returns),
    )


ESTIMATOR = Estimator(gae, reads=("gamma", "lambd", "gae_unit"), token_rewards=True, needs_values=True)


def _by_token(sequence: TurnSequence, gamma: float, lambd: float) -> tuple[Float64Array, Float64Array]:
    """Advantages [N] and value targets [N] of a sequence, one step per policy token."""
    advantages = _estimate(sequence.rewards_of_tokens(gamma), sequence.values, gamma, lambd)
    return advantages, advantages + sequence.values


def _by_turn(sequence: TurnSequence, gamma: float, lambd: float) -> tuple[Float64Array, Float64Array]:
    """As `_by_token`, one step per turn; turns without a policy token are no steps."""
    _, firsts, turns = np.unique(sequence.turn_of_token, return_index=True, return_inverse=True)
    values = sequence.values[firsts]
    rewards = np.add.reduceat(sequence.rewards_of_tokens(gamma, "turn"), firsts)
    advantages = _estimate(rewards, values, gamma, lambd)
    return advantages[turns], (advantages + values)[turns]


def _estimate(rewards: Float64Array, values: Float64Array, gamma: float, lambd: float) -> Float64Array:
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    return discounted(deltas, gamma * lambd)
