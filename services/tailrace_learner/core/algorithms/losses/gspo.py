"""One ratio for the whole row.

    s = exp(mean over the row of (log pi - log pi_old))
    loss = -min(s A, clip(s, 1 - low, 1 + high) A)

`dapo` with s for u; low and high are `gspo_clip` and `gspo_clip_high`, far smaller because s is a
mean. The value is s. The gradient is s times that of each token's own log pi, so advantages may
differ along a row (GSPO-token); if they do not, it is the gradient of s itself.
`loss_aggregation: seq_mean_token_mean` gives the objective of the paper.

A behaviour correction with `correction_level: token` (the default) weighs each token of the row by its
own rho, though the row has one ratio and is clipped as one. The gradient is then the sum of
w_t s A grad log pi_t, that of no ratio of rows, and the noise of single tokens that s averages out
comes back. `sequence` gives the row one weight; `none` is the paper's objective.

Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.losses.dapo import clip_ratio
from tailrace_learner.core.algorithms.ratios import summed_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

    from tailrace_learner.core.algorithms.losses.spans import Spans


def gspo(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Clips the row's ratio."""
    ratio = span_ratio(inputs, inputs.rows)
    return clip_ratio(ratio, inputs.advantages, config.gspo_clip, config.gspo_clip_high)


LOSS = Loss(gspo, reads=("gspo_clip", "gspo_clip_high"))


def span_ratio(inputs: LossInputs, spans: Spans) -> Tensor:
    """Length-normalised ratio [M] of each token's span, with the gradient of the token alone."""
    learner_logprobs = inputs.learner_logprobs.detach()
    ratio = spans.means(summed_log_ratio(learner_logprobs, inputs.proximal_logprobs)).exp()
    return ratio * (inputs.learner_logprobs - learner_logprobs).exp()
