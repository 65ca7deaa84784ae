"""Truncated importance sampling: weight min(rho, C), C = `tis_cap`."""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Correction
from tailrace_learner.core.algorithms.corrections.base import Weighed, ratio
from tailrace_learner.core.algorithms.losses.base import LossInputs


def tis(inputs: LossInputs, config: LearnerConfig) -> Weighed:
    """Truncates weights."""
    weights = ratio(inputs, config)
    counts = {"tis_truncated_fraction": (weights > config.tis_cap).sum()}
    return weights.clamp(max=config.tis_cap), counts


CORRECTION = Correction(tis, reads=("tis_cap", "correction_level"))
