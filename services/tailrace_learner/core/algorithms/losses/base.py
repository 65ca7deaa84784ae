"""What a policy loss takes and returns: flat per-token tensors, all of length M.

A loss says what one token costs. Weights of tokens, behaviour correction, entropy and the division by
the step's count are applied outside, the same for every loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.config import LearnerConfig


@dataclass(frozen=True, slots=True)
class Spans:
    """Consecutive tokens that belong together (rows, turns): `lengths` [S] >= 1, summing to M."""

    lengths: NDArray[np.int64]

    def sums(self, values: Tensor) -> Tensor:
        """The sum [M] of its span at every token, differentiable."""
        lengths = torch.from_numpy(self.lengths).to(values.device)
        index = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
        return values.new_zeros(len(lengths)).index_add(0, index, values)[index]

    def means(self, values: Tensor) -> Tensor:
        """The mean [M] of its span at every token, differentiable."""
        sizes = torch.from_numpy(np.repeat(self.lengths, self.lengths)).to(values)
        return self.sums(values) / sizes


NO_SPANS = Spans(np.zeros(0, np.int64))


@dataclass(frozen=True, slots=True)
class LossInputs:
    """The trained tokens of one pass. Only `log_pi` carries a gradient."""

    log_pi: Tensor  # [M] current policy
    log_pi_old: Tensor  # [M] policy at the start of the step
    log_mu: Tensor  # [M] policy that sampled, as the engine reported it
    advantages: Tensor  # [M]
    rows: Spans = NO_SPANS
    turns: Spans = NO_SPANS  # given to losses that look at turns
    is_picked: Tensor | None = None  # [M] 1 where the loss's selection picked the token


@dataclass(frozen=True, slots=True)
class LossTerms:
    """`per_token` [M] is to be minimised; `counts` are sums over tokens, reported as fractions."""

    per_token: Tensor
    counts: dict[str, Tensor] = field(default_factory=dict)


Loss = Callable[[LossInputs, LearnerConfig], LossTerms]


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """All trained tokens of a mini-batch before its update, for losses that pick some of them."""

    log_pi: NDArray[np.float64]  # [N] current policy
    log_pi_old: NDArray[np.float64]  # [N]
    log_mu: NDArray[np.float64]  # [N]
    advantages: NDArray[np.float64]  # [N]
    draws: NDArray[np.float64]  # [N] uniform in 0 to 1, decided by each token's place in its row


Selection = Callable[[BatchTokens, LearnerConfig], NDArray[np.bool_]]
