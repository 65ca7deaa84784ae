"""A trust region on the second moment of the mini-batch instead of a clip on every token.

    d = log pi - log mu,  loss = -exp(d) A, 0 on the tokens left out

Only tokens that a clip could affect are left out (A > 0 and d > 0, or A < 0 and d < 0): those of
largest d^2, one after the other, until the mean of d^2 over the remaining tokens of the mini-batch is
at most `m2_threshold`. So stale data are trained except for the few tokens that have drifted far.
Tokens whose log-ratio is clamped have no gradient and are not part of the mean. One pass of the
mini-batch without gradient picks them. Takes no other correction.

Zheng et al. 2025, "Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on
LLMs?", arXiv:2510.01161.
"""

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import BatchTokens, Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.ratios import BOUND, log_ratio


def m2po(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Takes the plain ratio of the tokens that stay."""
    assert inputs.is_picked is not None
    ratio = log_ratio(inputs.learner_logprobs, inputs.inference_logprobs).exp()
    kept = 1.0 - inputs.is_picked
    return LossTerms(-ratio * inputs.advantages * kept, {"m2_masked_fraction": inputs.is_picked.sum()})


def pick_m2po(tokens: BatchTokens, config: LearnerConfig) -> NDArray[np.bool_]:
    """Picks the tokens [N] to leave out."""
    difference = tokens.learner_logprobs - tokens.inference_logprobs
    is_near = np.abs(difference) <= BOUND
    squares, num_tokens = np.where(is_near, difference**2, 0.0), np.count_nonzero(is_near)
    candidates = np.flatnonzero(is_near & (difference * tokens.advantages > 0))
    candidates = candidates[np.argsort(-squares[candidates], kind="stable")]
    removed = np.cumsum(squares[candidates])
    left = num_tokens - np.arange(1, len(candidates) + 1)
    means = (squares.sum() - removed) / np.maximum(left, 1)
    picked = np.zeros(len(squares), np.bool_)
    if squares.sum() > config.m2_threshold * num_tokens:
        enough = np.flatnonzero(means <= config.m2_threshold)
        picked[candidates[: enough[0] + 1 if len(enough) else len(candidates)]] = True
    return picked


LOSS = Loss(m2po, reads=("m2_threshold",), selects=pick_m2po, off_policy=True)
