"""Mirror descent towards the advantages, anchored at the step's start.

    loss = -A log pi + (tau / 2) D (log pi - log pi_old),  D = sum over the row of (log pi - log pi_old)

Summed over a row the second term is (tau / 2) D^2: the paper squares the log-ratio of the whole
response and not of each token. tau is `kimi_tau`.

A behaviour correction weighs the anchor too. With `correction_level: token` (the default) each token
has a weight w_t of its own, and the second term is (tau / 2) D sum(w_t (log pi_t - log pi_old_t)): no
square, and tokens of small weight are held less. `sequence` keeps it a square, (tau / 2) w D^2; `none`
is the paper's objective, whose samples come from pi_old.

Kimi Team 2025, "Kimi k1.5", arXiv:2501.12599, equation 3.
"""

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses.base import Loss, LossInputs, LossTerms
from tailrace_learner.core.algorithms.ratios import summed_log_ratio


def kimi15(inputs: LossInputs, config: LearnerConfig) -> LossTerms:
    """Follows advantages and stays near the start of the step."""
    difference = summed_log_ratio(inputs.learner_logprobs, inputs.proximal_logprobs)
    anchor = 0.5 * config.kimi_tau * inputs.rows.sums(difference) * difference
    return LossTerms(-inputs.advantages * inputs.learner_logprobs + anchor)


LOSS = Loss(kimi15, reads=("kimi_tau",))
