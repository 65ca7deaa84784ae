"""Return of every turn.

    G_k = r_k + gamma G_(k+1),  A = (G_k - mean) / (std + 1e-6) on every policy token of turn k

Mean and standard deviation (ddof 1) are taken over all turns of the valid members of group g; a turn
counts once for any number of tokens. `norm_std: false` leaves out the division. If all turns of a
group have the same return, it has no learning signal.

Turn-level credit: Zeng et al. 2025, "Reinforcing Multi-Turn Reasoning in LLM Agents via Turn-Level
Credit Assignment", arXiv:2505.11821.
"""

import numpy as np
from numpy.typing import NDArray

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
from tailrace_learner.core.algorithms.advantages.comparison import comparable
from tailrace_learner.core.algorithms.advantages.turn_sequences import (
    TurnSequence,
    of_sequences,
    turn_sequences,
)

TURN_ROUNDING = 1e-6  # turn rewards travel as float32


def turn_reinforce(returns: Returns, config: LearnerConfig) -> Advantages:
    """Compares the turns of a group with each other."""
    found = turn_sequences(returns)
    turn_returns = [sequence.returns_to_go(config.gamma) for sequence in found]
    return compare_units(
        returns, config, found, turn_returns, [sequence.turn_of_token for sequence in found]
    )


ESTIMATOR = Estimator(turn_reinforce, reads=("norm_std", "gamma"), compares_group=True)


def compare_units(
    returns: Returns,
    config: LearnerConfig,
    found: list[TurnSequence],
    turn_returns: list[Float64Array],
    unit_of_token: list[NDArray[np.int64]],
) -> Advantages:
    """Normalises the returns of the units [U] of each sequence over the group, each counted once."""
    members = np.array([sequence.member for sequence in found], np.int64)
    if len(np.unique(members)) < 2:
        return nothing(returns, Verdict.TOO_FEW_VALID)
    trained = list(map(_trained, turn_returns, unit_of_token))
    conversations = np.array([sequence.conversation for sequence in found], np.int64)
    sizes = np.array([sequence.size for sequence in found])
    known = {
        place: _statistics(trained, pool, config, float(sizes[pool].max()))
        for place, pool in comparable(members, conversations).items()
    }
    statistics = (known[sequence.conversation] for sequence in found)
    values = [
        (each[owners] - mean) / scale
        for each, owners, (mean, scale) in zip(turn_returns, unit_of_token, statistics, strict=True)
    ]
    return of_sequences(returns, found, values)


def _trained(turn_returns: Float64Array, unit_of_token: NDArray[np.int64]) -> Float64Array:
    """Returns of the units that have tokens."""
    trained: Float64Array = turn_returns[np.unique(unit_of_token)]
    return trained


def _statistics(
    trained: list[Float64Array], pool: NDArray[np.bool_], config: LearnerConfig, size: float
) -> tuple[float, float]:
    """Mean and scale over the sequences of `pool`; infinite scale where all returns are the same."""
    values = np.concatenate([trained[index] for index in np.flatnonzero(pool)])
    if are_equal(values, TURN_ROUNDING, size):
        return 0.0, np.inf
    return float(values.mean()), float(values.std(ddof=1)) + STD_EPSILON if config.norm_std else 1.0
