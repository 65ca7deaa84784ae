"""Clipped policy gradient with separate bounds ("clip-higher").

    u = exp(log pi - log pi_old)
    loss = -min(u A, clip(u, 1 - low, 1 + high) A)

Yu et al. 2025, "DAPO", arXiv:2503.14476. A larger `high` lets unlikely good tokens grow.
"""

from __future__ import annotations

import torch

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.losses.base import LossInputs, LossTerms


def dapo(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Clip below 1 - `pg_clip` and above 1 + `pg_clip_high`."""
    return clipped(inputs, config.pg_clip, config.pg_clip_high)


def clipped(inputs: LossInputs, low: float, high: float) -> LossTerms:
    """The clipped loss with given bounds; counts tokens whose gradient the clip removed."""
    ratio = torch.exp(inputs.log_pi - inputs.log_pi_old)
    straight = ratio * inputs.advantages
    bounded = ratio.clamp(1.0 - low, 1.0 + high) * inputs.advantages
    is_clipped = (bounded < straight).sum()
    return LossTerms(-torch.minimum(straight, bounded), {"clip_fraction": is_clipped})
