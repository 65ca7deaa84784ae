"""Geometric mean of clipped token ratios.

    d_t = log pi_t - log pi_old_t,  b_t = min(d_t, c) where A >= 0, max(d_t, -c) where A < 0
    loss = -A exp(mean over the row of b_t)

`gspo` with the clip on tokens instead of rows, only in the direction of the advantage, and wide
(c = `gmpo_clip` 0.4). One outlier token changes the mean little. Advantages should be the same along a
row, as in the paper; `loss_aggregation: seq_mean_token_mean` gives its objective. With
`correction_level: token` the row is weighed by the mean of its tokens' weights.

Zhao et al. 2025, "Geometric-Mean Policy Optimization", arXiv:2507.20673.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.ratios import summed_log_ratio


def gmpo(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Weighs the advantage by the row's geometric mean."""
    difference = summed_log_ratio(inputs.learner_logprobs, inputs.proximal_logprobs)
    bound = config.gmpo_clip
    is_negative = inputs.advantages < 0
    bounded = difference.clamp(min=-bound).where(is_negative, difference.clamp(max=bound))
    counts = {"clip_fraction": (bounded != difference).sum()}
    return LossTerms(-inputs.advantages * inputs.rows.means(bounded).exp(), counts)


LOSS = Loss(gmpo, reads=("gmpo_clip",))
