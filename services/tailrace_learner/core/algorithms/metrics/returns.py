"""Mean and sample deviation of the returns of valid members, and their success rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from tailrace_learner.config_registry import Metric
from tailrace_learner.core.algorithms.metrics.base import Metrics, StepData, mean

if TYPE_CHECKING:
    from tailrace_learner.core.batch.rows import PreparedGroup


def returns(step: StepData, config: Any) -> Metrics:
    """Returns over all groups of the step."""
    return returns_of(step.groups)


METRIC = Metric(returns)


def returns_of(groups: Iterable[PreparedGroup]) -> Metrics:
    """Returns over some groups."""
    groups = list(groups)
    rewards = [reward for group in groups for reward in group.rewards]
    successes = [success for group in groups for success in group.successes]
    return {
        "reward_mean": mean(rewards),
        "reward_std": float(np.std(rewards, ddof=1)) if len(rewards) > 1 else None,
        "success_rate": mean(successes),
    }
