"""Cross-entropy on given tokens, for warm starts.

    loss = -log pi

The caller chooses the weights of tokens: with `token_mean` this is the ordinary language-modelling
loss over the masked tokens.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms


def sft(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Raises the probability of every given token; reads no advantages and no other policies."""
    return LossTerms(-inputs.learner_logprobs)


LOSS = Loss(sft, ignores_advantages=True)
