"""Return of every step row.

    G_t = r_t + step_gamma G_(t+1),  A = (G_t - mean) / (std + 1e-6) on every policy token of step t

A step is a row: mean and standard deviation (ddof 1) are taken over the step rows of the valid
members of group g, each counted once. The unit of `turn_reinforce` is the turn, so both agree if
every row is one turn. A row of several turns has the return of its first. `norm_std: false` leaves
out the division.

Feng et al. 2025, "Group-in-Group Policy Optimization for LLM Agent Training", arXiv:2505.10978,
step-level part without anchors.
"""

import numpy as np

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Estimator
from tailrace_learner.core.algorithms.advantages.base import Advantages, Returns
from tailrace_learner.core.algorithms.advantages.turn_reinforce import compare_units
from tailrace_learner.core.algorithms.advantages.turn_sequences import turn_sequences


def step_reinforce(returns: Returns, config: LearnerConfig) -> Advantages:
    """Compares the step rows of a group with each other."""
    found = turn_sequences(returns)
    turn_returns = [
        sequence.returns_to_go(config.step_gamma)[sequence.row_starts] for sequence in found
    ]
    rows = [
        np.searchsorted(sequence.row_starts, sequence.turn_of_token, side="right") - 1
        for sequence in found
    ]
    return compare_units(returns, config, found, turn_returns, rows)


ESTIMATOR = Estimator(step_reinforce, reads=("norm_std", "step_gamma"), compares_group=True)
