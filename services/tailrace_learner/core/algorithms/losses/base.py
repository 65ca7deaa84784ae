"""Data that a policy loss takes and returns: flat per-token tensors, all of length M.

A loss gives the cost of each token. Weights of tokens, behaviour correction, entropy and the division
by the step's count are applied outside, the same for every loss.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.config_registry import Loss as Loss

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace_learner.core.algorithms.losses.spans import Spans


@dataclass(frozen=True, slots=True)
class LossInputs:
    """Trained tokens of one pass. Only `learner_logprobs` carries a gradient."""

    learner_logprobs: Tensor  # [M] current policy
    proximal_logprobs: Tensor  # [M] policy at the start of the step
    inference_logprobs: Tensor  # [M] policy that sampled, as the engine reported it
    advantages: Tensor  # [M]
    rows: Spans
    turns: Spans  # empty unless the loss is declared with `reads_turns`
    is_picked: Tensor | None = None  # [M] 1 where the loss's selection picked the token


@dataclass(frozen=True, slots=True)
class LossTerms:
    """`per_token` [M] is to be minimised; `counts` are sums over tokens, reported as fractions."""

    per_token: Tensor
    counts: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BatchTokens:
    """All trained tokens of a mini-batch before its update, for losses that pick some of them."""

    learner_logprobs: NDArray[np.float64]  # [N] current policy
    proximal_logprobs: NDArray[np.float64]  # [N]
    inference_logprobs: NDArray[np.float64]  # [N]
    advantages: NDArray[np.float64]  # [N]
    draws: NDArray[np.float64]  # [N] uniform in 0 to 1, decided by each token's place in its row
