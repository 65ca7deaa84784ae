"""Generalised advantage estimation over policy tokens.

    delta_t = r_t + gamma V_(t+1) - V_t,  A_t = delta_t + gamma lambda A_(t+1)

t counts policy tokens, or turns (`gae_unit: turn`), one after the other: tokens of the environment in
between are skipped, neither valued nor discounted through. Rows that are stretches of one line of
turns are one sequence. V after the last is 0, for episodes end. V_t is what the critic
(`learner.critic`) says before token t, by its weights at the start of the step. A turn's reward lies on
its last policy token; with `kl_in: reward` every token also has -beta KL_t. With turns, V of a turn is
the value before its first policy token, r all its rewards, and all of its tokens have its advantage.
The target of the values is A + V. Tokens that the critic cannot read (rows longer than it reads) are
skipped as well: what their turns earned belongs to the turn before.

Turns of a message tree (conversations of agent loops and workflows) have a return each, discounted by
`turn_discount`. Their r_t are such that with lambda 1 the target is that return; where nothing forks
and `turn_discount` and gamma are 1 they are the turns' own rewards.

Schulman et al. 2015, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
arXiv:1506.02438; turns: arXiv:2505.11821.
"""

from __future__ import annotations

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
    """Compare what came with what the critic expected; without values it expected nothing."""
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
    """Advantages [N] and value targets [N] of a line's policy tokens, each a step."""
    advantages = _estimate(sequence.rewards_of_tokens(gamma), sequence.values, gamma, lambd)
    return advantages, advantages + sequence.values


def _by_turn(sequence: TurnSequence, gamma: float, lambd: float) -> tuple[Float64Array, Float64Array]:
    """As `_by_token`, all tokens of a turn being one step; turns without a policy token are none."""
    _, firsts, turns = np.unique(sequence.turn_of_token, return_index=True, return_inverse=True)
    values = sequence.values[firsts]
    rewards = np.add.reduceat(sequence.rewards_of_tokens(gamma, "turn"), firsts)
    advantages = _estimate(rewards, values, gamma, lambd)
    return advantages[turns], (advantages + values)[turns]


def _estimate(rewards: Float64Array, values: Float64Array, gamma: float, lambd: float) -> Float64Array:
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    return discounted(deltas, gamma * lambd)
