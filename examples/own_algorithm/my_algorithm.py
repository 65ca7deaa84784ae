"""An advantage estimator, `my_algorithm:MEDIAN`, and a loss, `my_algorithm:SOFT_CLIP`."""

import numpy as np
import torch

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms import (
    Advantages,
    Estimator,
    Loss,
    LossInputs,
    LossTerms,
    Returns,
    compared,
)


def median(returns: Returns, config: LearnerConfig) -> Advantages:
    """A = R - median of the group's returns."""
    return compared(returns, lambda group: (float(np.median(group.returns)), 1.0))


def soft_clip(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """loss = -exp(eps tanh(d / eps)) A, d = log pi - log pi_old, eps = `pg_clip`."""
    change = inputs.learner_logprobs - inputs.proximal_logprobs
    ratio = torch.exp(config.pg_clip * torch.tanh(change / config.pg_clip))
    far = (change.abs() > config.pg_clip).sum()
    return LossTerms(-ratio * inputs.advantages, {"far_fraction": far})


MEDIAN = Estimator(median, compares_group=True)
SOFT_CLIP = Loss(soft_clip, reads=("pg_clip",))
