"""Algorithms: advantage estimators, losses, corrections, optimizers, metrics, aggregations,
divergences.

A user's file imports from here: `Estimator`, `Loss`, `Correction`, `Optimizer` and `Metric` declare an
algorithm, the rest is
what its function takes and returns.
"""

from tailrace_learner.config_registry import (
    CORRECTIONS,
    ESTIMATORS,
    LOSSES,
    METRICS,
    OPTIMIZERS,
    Correction,
    Estimator,
    Loss,
    Metric,
    Optimizer,
)
from tailrace_learner.core.algorithms.advantages.base import Advantages, Returns, Turns, Verdict
from tailrace_learner.core.algorithms.advantages.comparison import ComparisonSet, compared
from tailrace_learner.core.algorithms.losses.base import BatchTokens, LossInputs, LossTerms
from tailrace_learner.core.algorithms.metrics import Metrics, StepData

__all__ = [
    "CORRECTIONS",
    "ESTIMATORS",
    "LOSSES",
    "METRICS",
    "OPTIMIZERS",
    "Advantages",
    "BatchTokens",
    "ComparisonSet",
    "Correction",
    "Estimator",
    "Loss",
    "LossInputs",
    "LossTerms",
    "Metric",
    "Metrics",
    "Optimizer",
    "Returns",
    "StepData",
    "Turns",
    "Verdict",
    "compared",
]
