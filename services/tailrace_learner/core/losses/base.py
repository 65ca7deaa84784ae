"""What a policy loss takes and returns: flat per-token tensors, all of length M.

A loss says what one token costs. Weights of tokens, behaviour correction, entropy and the division by
the step's count are applied outside, the same for every loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from tailrace_learner.config import LearnerConfig


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of one pass. Only `log_pi` carries a gradient."""

    log_pi: Tensor  # [M] current policy
    log_pi_old: Tensor  # [M] policy at the start of the step
    log_mu: Tensor  # [M] policy that sampled, as the engine reported it
    advantages: Tensor  # [M]


@dataclass(frozen=True, slots=True)
class LossTerms:
    """`per_token` [M] is to be minimised; `counts` are sums over tokens, reported as fractions."""

    per_token: Tensor
    counts: dict[str, Tensor] = field(default_factory=dict)


Loss = Callable[[LossInputs, LearnerConfig], LossTerms]
