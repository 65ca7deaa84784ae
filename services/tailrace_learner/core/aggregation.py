"""How token losses become one number, in a form that does not depend on how tokens were batched.

An aggregation gives each token a weight that only its own row decides, and each row a divisor; the
loss of an update is (sum of weight * loss) / (sum of divisors), divided once, after all gradients
were summed.

    token_mean               weight 1                       divisor: trained tokens of the row
    seq_mean_token_sum       weight 1                       divisor: 1
    seq_mean_token_mean      weight 1 / trained tokens      divisor: 1
    seq_mean_token_sum_norm  weight 1 / loss_norm_tokens    divisor: 1
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from tailrace_learner.config import LearnerConfig


class RowShare(NamedTuple):
    """One row's part in an update."""

    token_weight: float
    divisor: float


Aggregation = Callable[[int, LearnerConfig], RowShare]

AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": lambda num_tokens, config: RowShare(1.0, float(num_tokens)),
    "seq_mean_token_sum": lambda num_tokens, config: RowShare(1.0, 1.0),
    "seq_mean_token_mean": lambda num_tokens, config: RowShare(1.0 / num_tokens, 1.0),
    "seq_mean_token_sum_norm": lambda num_tokens, config: RowShare(1.0 / config.loss_norm_tokens, 1.0),
}
