"""Group relative policy optimization: `dapo` with a symmetric clip, and the divergence in the loss.

    loss = -min(u A, clip(u, 1 - eps, 1 + eps) A) + beta KL_t

eps is `pg_clip`. The second term is added to every token after the loss, as for every other loss: beta
is `init_kl_coef` (the paper's is 0.04, the default 0 leaves the term out) and KL_t the estimator
`kl_estimator`, whose default `k3` is the paper's. A divergence in the reward (`kl_in: reward`) is
refused here. The paper divides by each row's length: `loss_aggregation: seq_mean_token_mean`.

Shao et al. 2024, "DeepSeekMath: Pushing the Limits of Mathematical Reasoning in Open Language
Models", arXiv:2402.03300.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.losses.dapo import clipped


def grpo(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Clips to 1 ± `pg_clip`; the divergence is added outside."""
    return clipped(inputs, config.pg_clip, config.pg_clip, config.dual_clip)


LOSS = Loss(grpo, reads=("pg_clip", "dual_clip"), has_divergence=True)
