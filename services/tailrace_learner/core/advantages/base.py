"""What an advantage estimator takes and returns."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig

Float64Array = NDArray[np.float64]


class Verdict(enum.StrEnum):
    """What a group is good for."""

    TRAIN = "train"
    TOO_FEW_VALID = "too_few_valid"  # advantages are 0
    ZERO_VARIANCE = "zero_variance"  # advantages are 0


@dataclass(frozen=True, slots=True)
class Returns:
    """A group as an estimator sees it: one entry per member, in their order."""

    rewards: Float64Array  # [G] episode returns; those of invalid members are never read
    is_valid: NDArray[np.bool_]  # [G]
    loss_masks: tuple[NDArray[np.uint8], ...]  # G times [T]


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantage of every token; 0 where the loss mask is 0 and on invalid members."""

    per_token: tuple[Float64Array, ...]  # G times [T]
    verdict: Verdict


Estimator = Callable[[Returns, LearnerConfig], Advantages]


def broadcast(values: Float64Array, returns: Returns) -> tuple[Float64Array, ...]:
    """One value per member [G], put on each of the member's policy tokens."""
    pairs = zip(values, returns.loss_masks, strict=True)
    return tuple(value * (mask != 0).astype(np.float64) for value, mask in pairs)
