"""One ratio for every turn.

    s_k = exp(mean over turn k of (log pi - log pi_old))
    loss = -min(s_k A, clip(s_k, 1 - low, 1 + high) A)

`gspo` with turns in place of rows, and the bounds of `dapo`. All tokens of a turn are clipped together,
independently of other turns.

A behaviour correction weighs each token of a turn by its own rho (`correction_level: token`), as it
does with `gspo`, or all turns of a row by the row's product (`sequence`); there is no weight of a turn.
`geometric_mask` leaves rows out as a whole, so that it keeps the ratio of each turn.

After Zheng et al. 2025, "Group Sequence Policy Optimization", arXiv:2507.18071.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.losses.dapo import clip_ratio
from tailrace_learner.core.algorithms.losses.gspo import span_ratio


def segment(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Clips each turn's ratio."""
    ratio = span_ratio(inputs, inputs.turns)
    return clip_ratio(ratio, inputs.advantages, config.pg_clip, config.pg_clip_high)


LOSS = Loss(segment, reads=("pg_clip", "pg_clip_high"), reads_turns=True)
