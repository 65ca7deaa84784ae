"""Number and staleness of the trained tokens."""

from typing import Any

import numpy as np

from tailrace_learner.config_registry import Metric
from tailrace_learner.core.algorithms.metrics.base import Metrics, StepData


def tokens(step: StepData, config: Any) -> Metrics:
    """Counts tokens of rows; staleness is in optimizer steps."""
    staleness = np.concatenate([row.staleness for row in step.rows]) if step.rows else np.zeros(0)
    return {
        "staleness_mean": float(staleness.mean()) if len(staleness) else None,
        "staleness_max": float(staleness.max()) if len(staleness) else None,
        "num_trained_tokens": float(len(staleness)),
        "num_row_tokens": float(sum(len(row.token_ids) for row in step.rows)),
    }


METRIC = Metric(tokens)
