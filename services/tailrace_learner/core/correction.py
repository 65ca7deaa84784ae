"""Behaviour correction: weights for tokens that another policy sampled than the one being improved.

    rho = exp(log pi_old - log mu),  weight = min(rho, C)      (`tis`, per token)

pi_old is the learner at the start of the step, mu the engine's policy that sampled the token. The
weight multiplies the policy loss of every token in every pass, whatever the loss; it is no function of
the current weights. Truncated importance sampling: Ionides 2008; on learner/engine mismatch: Yao et
al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; beside a clip of
pi/pi_old: "decoupled PPO", Hilton et al. 2022, arXiv:2110.00641, and AReaL, arXiv:2505.24298.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.losses.base import LossInputs

Correction = Callable[[LossInputs, LearnerConfig], tuple[Tensor, dict[str, Tensor]]]


def tis(inputs: LossInputs, config: LearnerConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Truncated weights [M] and how many were truncated."""
    ratio = torch.exp(inputs.log_pi_old - inputs.log_mu)
    counts = {"tis_truncated_fraction": (ratio > config.tis_cap).sum()}
    return ratio.clamp(max=config.tis_cap), counts


def uncorrected(inputs: LossInputs, config: LearnerConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Weight 1 for every token."""
    return torch.ones_like(inputs.log_mu), {}


CORRECTIONS: dict[str, Correction] = {"tis": tis, "none": uncorrected}
