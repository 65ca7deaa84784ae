"""Proximal log-probabilities without a forward pass.

    log pi_prox = log mu + alpha (log pi - log mu)
    alpha = (v_prox - v_b) / (v - v_b),  v_prox = v - 1;  0 where v_b >= v_prox

v is the learner's version and v_b the token's, in optimizer steps, so with age a = v - v_b, alpha is
(a - 1) / a, and 0 up to an age of 1. log pi is the current policy, without gradient. The result
approximates the weights one step before the current ones. It is exact for tokens of age 0 and 1 if
engine and learner agree, and is between the two known values for older ones.

Fu et al. 2025, "AReaL", arXiv:2505.24298, decoupled objective; the approximation: "A-3PO",
arXiv:2512.06547.
"""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


def interpolation_weights(ages: NDArray[np.int64]) -> NDArray[np.float32]:
    """alpha [M] for ages [M] in optimizer steps."""
    alpha: NDArray[np.float32] = ((ages - 1) / np.maximum(ages, 1)).clip(0.0).astype(np.float32)
    return alpha


def interpolated(learner_logprobs: Tensor, inference_logprobs: Tensor, alpha: Tensor) -> Tensor:
    """log pi_prox [M]."""
    return inference_logprobs + alpha * (learner_logprobs.detach() - inference_logprobs)
