"""Advantage estimators by name: one file each, with formula and paper."""

from tailrace_learner.core.advantages.base import Advantages, Estimator, Returns, Verdict
from tailrace_learner.core.advantages.grpo import grpo

ESTIMATORS: dict[str, Estimator] = {"grpo": grpo}

__all__ = ["ESTIMATORS", "Advantages", "Estimator", "Returns", "Verdict"]
