"""No correction: weight 1 for every token."""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Correction
from tailrace_learner.core.algorithms.corrections.base import Weighed
from tailrace_learner.core.algorithms.losses.base import LossInputs


def uncorrected(inputs: LossInputs, config: LearnerConfig) -> Weighed:
    """Weighs all tokens alike."""
    return inputs.inference_logprobs.new_ones(inputs.inference_logprobs.shape), {}


CORRECTION = Correction(uncorrected)
