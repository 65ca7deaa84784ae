"""PPO whose clip is centred on another policy than the one that sampled.

    u = exp(log pi - log pi_old),  rho = exp(log pi_old - log mu)
    loss = -min(rho, C) min(u A, clip(u, 1 - eps, 1 + eps) A)

`ppo_clip` times a behaviour weight that is always applied: truncated at C = `tis_cap`, or not at all
with `tis_cap: .inf` (up to e^20), which is the paper's objective. Takes no other correction.

Hilton et al. 2022, arXiv:2110.00641; Fu et al. 2025, "AReaL", arXiv:2505.24298.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.losses.ppo_clip import ppo_clip
from tailrace_learner.core.algorithms.ratios import log_ratio


def decoupled_ppo(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Clips around the proximal policy, and weighs by its ratio to the behaviour policy."""
    terms = ppo_clip(inputs, config)
    rho = log_ratio(inputs.proximal_logprobs, inputs.inference_logprobs).exp()
    counts = {"behaviour_truncated_fraction": (rho > config.tis_cap).sum()}
    return LossTerms(rho.clamp(max=config.tis_cap) * terms.per_token, terms.counts | counts)


LOSS = Loss(decoupled_ppo, reads=("pg_clip", "dual_clip", "tis_cap"), off_policy=True)
