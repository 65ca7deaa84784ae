"""Cross-entropy on given tokens, for warm starts.

    loss = -log pi

Weights of tokens are the caller's: with `token_mean` this is the ordinary language-modelling loss
over the masked tokens.
"""

from __future__ import annotations

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Loss
from tailrace_learner.core.algorithms.losses.base import LossInputs, LossTerms


def sft(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Raise the probability of every given token; advantages and other policies are not read."""
    return LossTerms(-inputs.learner_logprobs)


LOSS = Loss(sft)
