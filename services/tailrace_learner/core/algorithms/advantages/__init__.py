"""Advantage estimators by name: one file each, with formula and paper.

All of them leave rows of invalid members (infra_failure, timeout, cancelled) out of every statistic.
Those that compare the members of a group give advantage 0 to groups with fewer than two valid ones;
the others need one.
"""

from tailrace_learner.core.algorithms.advantages.base import (
    Advantages,
    Estimator,
    Returns,
    Turns,
    Verdict,
)
from tailrace_learner.core.algorithms.advantages.gae import gae
from tailrace_learner.core.algorithms.advantages.gigpo import gigpo
from tailrace_learner.core.algorithms.advantages.grpo import grpo
from tailrace_learner.core.algorithms.advantages.opo import opo
from tailrace_learner.core.algorithms.advantages.reinforce import reinforce
from tailrace_learner.core.algorithms.advantages.reinforce_plus_plus import reinforce_plus_plus
from tailrace_learner.core.algorithms.advantages.reinforce_plus_plus_baseline import (
    reinforce_plus_plus_baseline,
)
from tailrace_learner.core.algorithms.advantages.remax import remax
from tailrace_learner.core.algorithms.advantages.rloo import rloo
from tailrace_learner.core.algorithms.advantages.starpo import starpo
from tailrace_learner.core.algorithms.advantages.step_reinforce import step_reinforce
from tailrace_learner.core.algorithms.advantages.turn_reinforce import turn_reinforce

ESTIMATORS: dict[str, Estimator] = {
    "grpo": grpo,
    "rloo": rloo,
    "reinforce": reinforce,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "gae": gae,
    "remax": remax,
    "opo": opo,
    "starpo": starpo,
    "turn_reinforce": turn_reinforce,
    "gigpo": gigpo,
    "step_reinforce": step_reinforce,
}

__all__ = ["ESTIMATORS", "Advantages", "Estimator", "Returns", "Turns", "Verdict"]
