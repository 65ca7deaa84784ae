"""Counts of groups, and of episodes, rows and tokens that are not trained."""

from collections import Counter
from typing import Any

from tailrace_learner.config_registry import Metric
from tailrace_learner.core.algorithms.metrics.base import Metrics, StepData

_COUNTED = (
    "num_invalid_episodes",
    "num_malformed_episodes",
    "num_nonfinite_rewards",
    "num_nonfinite_tokens",
    "num_masked_episodes",
    "num_overlong_rows",
    "num_unrewarded_rows",
    "num_quarantined_tokens",
    "num_stale_tokens",
    "num_groups_train",
    "num_groups_zero_variance",
    "num_groups_too_few_valid",
)


def counts(step: StepData, config: Any) -> Metrics:
    """Sums over the groups of the step."""
    total: Counter[str] = Counter(dict.fromkeys(_COUNTED, 0))
    for group in step.groups:
        total.update(group.counts)
    numbers: Metrics = {name: float(count) for name, count in total.items()}
    return numbers | {"num_groups": float(len(step.groups))}


METRIC = Metric(counts)
