"""REINFORCE with the whole step as baseline.

    A_t = whitened over the step: sum over s >= t of gamma^(s - t) (r_s - beta KL_s)

`reinforce`, always whitened over all trained tokens of the step; therefore it waits for the whole
step. beta is `init_kl_coef`. KL_s is in the reward of token s unless `kl_in` is `loss`; with a
coefficient of 0 there is none. The paper's estimate of it is `kl_estimator: k1`.

Hu et al. 2025, "REINFORCE++", arXiv:2501.03262.
"""

from tailrace_learner.config_registry import Estimator
from tailrace_learner.core.algorithms.advantages.reinforce import reinforce

ESTIMATOR = Estimator(
    reinforce, reads=("gamma",), token_rewards=True, whitens=True, divergence_in_reward=True
)
