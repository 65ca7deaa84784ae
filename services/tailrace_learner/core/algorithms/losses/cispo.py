"""Clipped weights instead of clipped tokens.

    loss = -sg(clip(u, 1 - low, 1 + high)) A log pi,  u = exp(log pi - log pi_old)

Every token keeps a gradient; only its weight is bounded. low is `cispo_clip` (1: no lower bound, as in
the paper), high is `cispo_clip_high`. sg stops the gradient.

MiniMax 2025, "MiniMax-M1", arXiv:2506.13585.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.ratios import log_ratio


def cispo(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Weighs each token by its bounded ratio."""
    ratio = log_ratio(inputs.learner_logprobs.detach(), inputs.proximal_logprobs).exp()
    weights = ratio.clamp(1.0 - config.cispo_clip, 1.0 + config.cispo_clip_high)
    counts = {"clip_fraction": (weights != ratio).sum()}
    return LossTerms(-weights * inputs.advantages * inputs.learner_logprobs, counts)


LOSS = Loss(cispo, reads=("cispo_clip", "cispo_clip_high"))
