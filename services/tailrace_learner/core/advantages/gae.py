"""Generalised advantage estimation over policy tokens.

    delta_t = r_t + gamma V_(t+1) - V_t,  A_t = delta_t + gamma lambda A_(t+1)

t counts policy tokens, or turns (`unit: turn`), one after the other: tokens of the environment in
between are skipped, neither valued nor discounted through. V after the last is 0, for episodes end.
With turns, V of a turn is the value at its first policy token, r its reward, and all of its tokens
have its advantage. The target of the values is A + V.

Schulman et al. 2015, "High-Dimensional Continuous Control Using Generalized Advantage Estimation",
arXiv:1506.02438; turns: arXiv:2505.11821. Needs a critic, so it is the arithmetic alone.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.core.advantages.base import Float64Array


def gae(
    rewards: Float64Array,
    values: Float64Array,
    turn_of_token: NDArray[np.int64],
    *,
    gamma: float,
    lambd: float,
    unit: Literal["token", "turn"] = "token",
) -> tuple[Float64Array, Float64Array]:
    """Advantages [N] and targets of the values [N] of a line's policy tokens.

    `rewards` [K] per turn, `values` [N], `turn_of_token` [N] ascending; every turn has a token.
    """
    firsts = np.searchsorted(turn_of_token, np.arange(len(rewards)))
    if unit == "turn":
        turns = _estimate(rewards, values[firsts], gamma, lambd)
        return turns[turn_of_token], (turns + values[firsts])[turn_of_token]
    per_token = np.zeros(len(values))
    lasts = np.append(firsts[1:], len(values)) - 1
    per_token[lasts] = rewards
    advantages = _estimate(per_token, values, gamma, lambd)
    return advantages, advantages + values


def _estimate(rewards: Float64Array, values: Float64Array, gamma: float, lambd: float) -> Float64Array:
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    for t in range(len(deltas) - 2, -1, -1):
        deltas[t] += gamma * lambd * deltas[t + 1]
    return deltas
