"""Behaviour correction: weights for tokens that another policy than the trained one sampled.

    rho = exp(log pi_old - log mu);  with `correction_level: sequence`, the product over the row

`geometric_mask` x also gives weight 0 to rows whose geometric mean of rho is outside 1 / (1 + x) to
1 + x: rows that drifted as a whole. A token whose mu cannot be right (log rho above 20, `ratios.py`) is
truncated or masked by itself; products and means of its row leave it out.

pi_old is the learner at the start of the step, mu the engine's policy that sampled the token. The
weight multiplies the policy loss of every token in every pass, for every loss, and does not depend
on the current weights. Truncated importance sampling: Ionides 2008; on learner/engine mismatch: Yao
et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"; masked, and the
geometric mask: Liu et al. 2025, "When Speed Kills Stability"; IcePop: Ling Team 2025,
arXiv:2510.18855; beside a clip of pi/pi_old: Hilton et al. 2022, arXiv:2110.00641, and AReaL,
arXiv:2505.24298.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Correction
from tailrace_learner.core.algorithms.losses.base import LossInputs
from tailrace_learner.core.algorithms.ratios import BOUND, log_ratio, summed_log_ratio

if TYPE_CHECKING:
    from torch import Tensor

Weighed = tuple["Tensor", dict[str, "Tensor"]]  # weights [M], and the number of tokens at each bound


def corrected(inputs: LossInputs, config: LearnerConfig) -> Weighed:
    """Weights [M] of the configured correction, with the geometric mask where it is on."""
    weights, counts = config.correction(inputs, config)
    if not config.geometric_mask:
        return weights, counts
    pair = inputs.proximal_logprobs, inputs.inference_logprobs
    drift = inputs.rows.means(summed_log_ratio(*pair)).abs()
    is_masked = drift > math.log1p(config.geometric_mask)
    counts = counts | {"geometric_masked_fraction": is_masked.sum()}
    return weights.masked_fill(is_masked, 0.0), counts


def tis(inputs: LossInputs, config: LearnerConfig) -> Weighed:
    """Truncated importance sampling: weight min(rho, C), C = `tis_cap`."""
    weights = _ratio(inputs, config)
    counts = {"tis_truncated_fraction": (weights > config.tis_cap).sum()}
    return weights.clamp(max=config.tis_cap), counts


def mis(inputs: LossInputs, config: LearnerConfig) -> Weighed:
    """Masked importance sampling: weight rho, 0 where rho > C, C = `tis_cap`."""
    weights = _ratio(inputs, config)
    is_masked = weights > config.tis_cap
    return weights.masked_fill(is_masked, 0.0), {"mis_masked_fraction": is_masked.sum()}


def icepop(inputs: LossInputs, config: LearnerConfig) -> Weighed:
    """IcePop: weight rho of each token, 0 outside `icepop_low` to `icepop_high`."""
    weights = log_ratio(inputs.proximal_logprobs, inputs.inference_logprobs).exp()
    is_masked = (weights < config.icepop_low) | (weights > config.icepop_high)
    return weights.masked_fill(is_masked, 0.0), {"icepop_masked_fraction": is_masked.sum()}


def uncorrected(inputs: LossInputs, config: LearnerConfig) -> Weighed:
    """No correction: weight 1 for every token."""
    return inputs.inference_logprobs.new_ones(inputs.inference_logprobs.shape), {}


TIS = Correction(tis, reads=("tis_cap", "correction_level"))
MIS = Correction(mis, reads=("tis_cap", "correction_level"))
ICEPOP = Correction(icepop, reads=("icepop_low", "icepop_high"))
NONE = Correction(uncorrected)


def _ratio(inputs: LossInputs, config: LearnerConfig) -> Tensor:
    """Proximal over behaviour probability [M], of a token or of all tokens of its row."""
    pair = inputs.proximal_logprobs, inputs.inference_logprobs
    if config.correction_level == "token":
        return log_ratio(*pair).exp()
    return inputs.rows.sums(summed_log_ratio(*pair)).clamp(-BOUND, BOUND).exp()
