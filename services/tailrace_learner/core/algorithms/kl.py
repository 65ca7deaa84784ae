"""Estimates of KL(pi || ref) from tokens that pi sampled, and a controller of its coefficient.

    k1 = log pi - log ref                        unbiased, may be negative
    k2 = (log pi - log ref)^2 / 2                biased, its gradient is that of the divergence
    k3 = exp(log ref - log pi) - 1 - (log ref - log pi)      unbiased, never negative
    abs = |log pi - log ref|

With `kl_in: loss` beta KL_t is added to the loss of every trained token, and pi is the current
policy. With `kl_in: reward` -beta KL_t is a reward of every policy token, and pi is the policy that
sampled it; `reinforce_plus_plus` does so by default. beta begins at `init_kl_coef`. With `target_kl`
it changes after every step with the step's mean divergence:

    beta <- beta (1 + clip(KL / target_kl - 1, -0.2, 0.2) n / max(n, kl_horizon))

n is the number of the step's episodes. A step whose divergence is not finite leaves beta as it is.

log pi - log ref is clamped to -20 to 20 (`ratios.py`). Beyond it the estimates keep the slope that they
have there; `k3` has none where pi is below ref, since it is e^20. In the reward a token whose reported
log-probability cannot be right (more than 20 below that of ref) costs nothing.

The gradient of k1 in the loss is 0 on average: use that estimator in the reward. The reference
(`learner.reference`) is the policy at the run's start or another model; with `init_kl_coef: 0`
there is none.

On-policy distillation: the reference is a teacher with the policy's tokens and `kl_in: reward` with
`k1`; with `adv_estimator: reinforce` and `gamma: 0` the advantage of token t is
beta (log ref - log pi), and `reward_clip: 0` leaves out the task's own reward
(`examples/distillation`). Agarwal et al. 2023, "On-Policy Distillation of Language Models",
arXiv:2306.13649; per sampled token: Gu et al. 2023, "MiniLLM", arXiv:2306.08543.

Schulman 2020, "Approximating KL Divergence". The controller: Ziegler et al. 2019, "Fine-Tuning
Language Models from Human Preferences", arXiv:1909.08593.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from tailrace_learner.core.algorithms.ratios import BOUND, held_log_ratio

_BOUND = 0.2  # largest relative error that the controller reacts to


def k3(learner_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Per-token [M] control-variate estimate."""
    difference = held_log_ratio(ref_logprobs, learner_logprobs)
    estimate = torch.expm1(difference) - difference
    return estimate.where(ref_logprobs - learner_logprobs <= BOUND, estimate.detach())


KL_ESTIMATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "k1": held_log_ratio,
    "k2": lambda learner, ref: 0.5 * held_log_ratio(learner, ref) ** 2,
    "k3": k3,
    "abs": lambda learner, ref: held_log_ratio(learner, ref).abs(),
}


def adapted(coef: float, kl: float, target_kl: float, num_samples: int, horizon: int) -> float:
    """Next coefficient; `num_samples` and `horizon` in episodes."""
    if not math.isfinite(kl):
        return coef
    error = min(max(kl / target_kl - 1.0, -_BOUND), _BOUND)
    return coef * (1.0 + error * min(num_samples / horizon, 1.0))
