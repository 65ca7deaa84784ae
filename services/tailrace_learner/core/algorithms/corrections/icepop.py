"""IcePop: weight rho of each token, 0 outside `icepop_low` to `icepop_high`."""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Correction
from tailrace_learner.core.algorithms.corrections.base import Weighed
from tailrace_learner.core.algorithms.losses.base import LossInputs
from tailrace_learner.core.algorithms.ratios import log_ratio


def icepop(inputs: LossInputs, config: LearnerConfig) -> Weighed:
    """Masks weights outside two bounds."""
    weights = log_ratio(inputs.proximal_logprobs, inputs.inference_logprobs).exp()
    is_masked = (weights < config.icepop_low) | (weights > config.icepop_high)
    return weights.masked_fill(is_masked, 0.0), {"icepop_masked_fraction": is_masked.sum()}


CORRECTION = Correction(icepop, reads=("icepop_low", "icepop_high"))
