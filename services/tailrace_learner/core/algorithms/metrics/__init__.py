"""Metrics of a step, one group of numbers per file; all built-in ones are always on."""

from typing import Any

from tailrace_learner.config_registry import METRICS
from tailrace_learner.core.algorithms.metrics.base import Metrics, StepData


def data_metrics(step: StepData, config: Any) -> Metrics:
    """Compute all built-in metrics of the groups and rows of a step."""
    numbers: Metrics = {}
    for metric in METRICS.values():
        numbers |= metric.fn(step, config)
    return numbers
