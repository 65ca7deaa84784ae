"""Group-in-group advantages: an episode compared with its group, a turn with turns at the same state.

    A = w_e E + w_s S
    E_i = (R_i - mean_g) / (std_g + 1e-6)          over the valid *episodes* of group g
    G_k = r_k + step_gamma G_(k+1)
    S_k = (G_k - mean_a) / (std_a + 1e-6)          over the turns of anchor group a

The anchor group of a turn is all turns of the valid members of g that began with the same
observation. The hash of an observation is salted with the task, so different tasks never share a
baseline. S is 0 for anchor groups of one turn, for those whose turns have equal returns, and for
turns whose observation is unknown. If episodes have several conversations with their own
rewards, R and E belong to a conversation and are compared with those of the same number; a conversation
without a reward has neither E nor S. Standard deviations have ddof 1; `norm_std: false` leaves out
both divisions.

Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training", arXiv:2505.10978.
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
from tailrace_learner.core.algorithms.advantages.comparison import (
    ComparisonSet,
    comparable,
    comparison_set,
)
from tailrace_learner.core.algorithms.advantages.turn_reinforce import TURN_ROUNDING
from tailrace_learner.core.algorithms.advantages.turn_sequences import (
    TurnSequence,
    of_sequences,
    turn_sequences,
)


def gigpo(returns: Returns, config: LearnerConfig) -> Advantages:
    """Weighs episode and step advantages; a group with 0 everywhere has no learning signal."""
    comparison = comparison_set(returns)
    if comparison.num_members < 2:
        return nothing(returns, Verdict.TOO_FEW_VALID)
    found = turn_sequences(returns)
    if not found:
        return nothing(returns, Verdict.ZERO_VARIANCE)
    episodes = _episode_advantages(comparison, config)
    values = [
        (episodes[sequence.member, sequence.conversation] + config.step_advantage_weight * steps)[
            sequence.turn_of_token
        ]
        for sequence, steps in zip(found, _step_advantages(found, config), strict=True)
    ]
    return of_sequences(returns, found, values)


def _reads_observations(config: LearnerConfig) -> bool:
    return config.step_advantage_weight != 0


ESTIMATOR = Estimator(
    gigpo,
    reads=("norm_std", "step_gamma", "episode_advantage_weight", "step_advantage_weight"),
    compares_group=True,
    compares_observations=_reads_observations,
)


def _episode_advantages(
    comparison: ComparisonSet, config: LearnerConfig
) -> dict[tuple[int, int], float]:
    """w_e E of each conversation, by its member and place."""
    found: dict[tuple[int, int], float] = {}
    for place, pool in comparable(comparison.members, comparison.conversations).items():
        compared = comparison.chosen(pool)
        values = _normalised(compared.returns, config, 0.0) * config.episode_advantage_weight
        pairs = zip(compared.members.tolist(), compared.conversations.tolist(), strict=True)
        found |= {
            pair: value for pair, value in zip(pairs, values.tolist(), strict=True) if pair[1] == place
        }
    return found


def _step_advantages(found: list[TurnSequence], config: LearnerConfig) -> list[Float64Array]:
    """S of the turns of each sequence, [K] each."""
    turn_returns = np.concatenate([sequence.returns_to_go(config.step_gamma) for sequence in found])
    sizes = np.concatenate([np.full(len(sequence.rewards), sequence.size) for sequence in found])
    result = np.zeros(len(turn_returns))
    for anchor in _anchor_groups(found):
        result[anchor] = _normalised(turn_returns[anchor], config, float(sizes[anchor].max()))
    return np.split(result, np.cumsum([len(sequence.rewards) for sequence in found])[:-1])


def _anchor_groups(found: list[TurnSequence]) -> list[NDArray[np.int64]]:
    """Places, among the turns of all sequences, of turns with one observation: two or more each."""
    places: dict[int, list[int]] = {}
    begin = 0
    for sequence in found:
        for offset, observation in enumerate(sequence.observations.tolist()):
            places.setdefault(observation, []).append(begin + offset)
        begin += len(sequence.rewards)
    return [np.array(group) for group in places.values() if len(group) > 1]


def _normalised(values: Float64Array, config: LearnerConfig, size: float) -> Float64Array:
    """(x - mean) / scale; 0 for values that differ by the rounding of sums of this `size` at most."""
    if are_equal(values, TURN_ROUNDING, size):
        return np.zeros(len(values))
    scale = values.std(ddof=1) + STD_EPSILON if config.norm_std else 1.0
    result: Float64Array = (values - values.mean()) / scale
    return result
