"""Aggregation of token losses to one number, independent of how tokens were batched.

An aggregation gives each token a weight that depends on its own row alone, and each row a divisor.
The loss of an update is (sum of weight * loss) / (sum of divisors), divided once, after all gradients
were summed.

    token_mean               weight 1                       divisor: trained tokens of the row
    seq_mean_token_sum       weight 1                       divisor: 1
    seq_mean_token_mean      weight 1 / trained tokens      divisor: 1
    seq_mean_token_sum_norm  weight 1 / loss_norm_tokens    divisor: 1

The rows are those of groups with a learning signal. Groups without one have no gradient and are not
computed. Those of equal returns are in the divisor all the same, as tokens of advantage 0 are in the
published GRPO, Dr. GRPO and REINFORCE++ and their implementations: a step of few groups with a signal
is a small one. `zero_variance_groups: skip` leaves them out of the divisor, `redraw` replaces them.
Groups of fewer than two valid members and conversations without a reward are in no divisor. An entropy
bonus applies only to rows with a learning signal. With a divergence in the loss (`init_kl_coef`) all
rows are trained, those without a signal with advantage 0, and all are in the divisor: the divergence
and an entropy bonus apply everywhere.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.batch.rows import TrainingRow


class RowShare(NamedTuple):
    """Part of one row in an update."""

    token_weight: float
    divisor: float


Aggregation = Callable[[int, LearnerConfig], RowShare]

AGGREGATIONS: dict[str, Aggregation] = {
    "token_mean": lambda num_tokens, config: RowShare(1.0, float(num_tokens)),
    "seq_mean_token_sum": lambda num_tokens, config: RowShare(1.0, 1.0),
    "seq_mean_token_mean": lambda num_tokens, config: RowShare(1.0 / num_tokens, 1.0),
    "seq_mean_token_sum_norm": lambda num_tokens, config: RowShare(1.0 / config.loss_norm_tokens, 1.0),
}


def row_count(
    rows: Sequence[TrainingRow], config: LearnerConfig, untrained: Sequence[int] = ()
) -> float:
    """Sum of the divisors of the rows, and of rows that are not computed, by their tokens."""
    share = AGGREGATIONS[config.loss_aggregation]
    lengths = (*(len(row.targets) for row in rows), *untrained)
    return sum(share(length, config).divisor for length in lengths)


def token_weights(rows: Sequence[TrainingRow], config: LearnerConfig) -> Tensor:
    """Weight [M] of every trained token of the rows, float32 on the host."""
    share = AGGREGATIONS[config.loss_aggregation]
    lengths = [len(row.targets) for row in rows]
    weights = [share(length, config).token_weight for length in lengths]
    return torch.from_numpy(np.repeat(weights, lengths).astype(np.float32))
