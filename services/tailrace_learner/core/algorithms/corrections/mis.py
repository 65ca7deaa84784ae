"""Masked importance sampling: weight rho, 0 where rho > C, C = `tis_cap`."""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Correction
from tailrace_learner.core.algorithms.corrections.base import Weighed, ratio
from tailrace_learner.core.algorithms.losses.base import LossInputs


def mis(inputs: LossInputs, config: LearnerConfig) -> Weighed:
    """Masks large weights."""
    weights = ratio(inputs, config)
    is_masked = weights > config.tis_cap
    return weights.masked_fill(is_masked, 0.0), {"mis_masked_fraction": is_masked.sum()}


CORRECTION = Correction(mis, reads=("tis_cap", "correction_level"))
