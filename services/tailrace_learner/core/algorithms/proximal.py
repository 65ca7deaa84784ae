"""Proximal log-probabilities without a forward pass.

    log pi_prox = log mu + alpha (log pi - log mu)
    alpha = (v_prox - v_b) / (v - v_b),  v_prox = v - 1;  0 where v_b >= v_prox

v is the learner's version and v_b the token's, in optimizer steps, so with age a = v - v_b, alpha is
(a - 1) / a, and 0 up to an age of 1. log pi is the current policy, without gradient. The result
approximates the weights one step before the current ones. It is exact for tokens of age 0 and 1 if
engine and learner agree, and is between the two known values for older ones. Where log mu cannot be
right (more than 20 below log pi, `ratios.py`), log pi_prox is log pi, as it is with `recompute` in a
step's first pass.

Fu et al. 2025, "AReaL", arXiv:2505.24298, decoupled objective; the approximation: "A-3PO",
arXiv:2512.06547.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.core.algorithms.ratios import BOUND


def interpolation_weights(ages: NDArray[np.int64]) -> NDArray[np.float32]:
    """alpha [M] for ages [M] in optimizer steps."""
    alpha: NDArray[np.float32] = ((ages - 1) / np.maximum(ages, 1)).clip(0.0).astype(np.float32)
    return alpha


def interpolated(learner_logprobs: Tensor, inference_logprobs: Tensor, alpha: Tensor) -> Tensor:
    """log pi_prox [M]."""
    learner_logprobs = learner_logprobs.detach()
    difference = learner_logprobs - inference_logprobs
    line = inference_logprobs + alpha * difference
    return learner_logprobs.where(difference > BOUND, line)
