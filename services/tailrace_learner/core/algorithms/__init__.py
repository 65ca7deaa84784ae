"""Algorithms: advantage estimators, losses, corrections, aggregations, divergences.

A user's file imports from here: `Estimator`, `Loss` and `Correction` declare an algorithm, the rest is
what its function takes and returns.
"""

from tailrace_learner.config_registry import (
    CORRECTIONS,
    ESTIMATORS,
    LOSSES,
    Correction,
    Estimator,
    Loss,
)
from tailrace_learner.core.algorithms.advantages.base import Advantages, Returns, Turns, Verdict
from tailrace_learner.core.algorithms.advantages.comparison import ComparisonSet, compared
from tailrace_learner.core.algorithms.losses.base import BatchTokens, LossInputs, LossTerms

__all__ = [
    "CORRECTIONS",
    "ESTIMATORS",
    "LOSSES",
    "Advantages",
    "BatchTokens",
    "ComparisonSet",
    "Correction",
    "Estimator",
    "Loss",
    "LossInputs",
    "LossTerms",
    "Returns",
    "Turns",
    "Verdict",
    "compared",
]
