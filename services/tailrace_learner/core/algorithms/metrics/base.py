"""Input and result of a metric."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow

Metrics = dict[str, float | None]
"""Numbers by name; None where a number is unknown."""


class StepData(NamedTuple):
    """Groups and rows of one finished step, from all ranks."""

    step: int  # that this one is; the first is 1
    groups: Sequence[PreparedGroup]  # their rewards, successes, counts and tags
    rows: Sequence[TrainingRow]  # trained rows: tokens, advantages, staleness


def mean(values: Sequence[float]) -> float | None:
    """Mean of the values; None if there are none."""
    return float(np.mean(values)) if values else None
