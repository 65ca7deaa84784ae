"""Log-ratios of two policies on sampled tokens, and the bound of what is exponentiated.

    log r = log new - log old, clamped to -20 to 20

Losses, corrections, divergences and metrics take the exponential of nothing else, so one token that is
far out leaves an update finite and the gradients of other tokens as they are. A token that `old`
sampled has a ratio above e^20 with a probability below e^-20: there `old` was reported wrongly. A ratio
below e^-20 is possible, and as good as 0. Beyond the bound

- a ratio is constant: the token has no gradient through it. A weight by a ratio stays at the bound,
  or at the cap of its loss or correction;
- a term that holds two policies together (divergences, penalties) keeps the slope that it has at the
  bound, except where that slope is an exponential (`k3`);
- a sum or mean of log-ratios (of a row, of a turn) takes -20 for a ratio below the bound: a product is
  near 0 if one factor is. It leaves a token above the bound out, whose ratio is not known.

Losses with a ratio of a row or turn (`gspo`, `segment`, `gmpo`, `topr`, `kimi15`),
`correction_level: sequence` and `geometric_mask` couple the tokens of a row by design: there a token
that is far out may change the gradients of its own row, never those of other rows. `m2po` picks tokens
by a mean over the mini-batch, of which such a token is no part: so another token near the threshold,
also one of another row, may be left out or stay.

A log-probability that is not finite has no ratio: its token is not trained (`num_nonfinite_tokens`).
Tokens beyond the bound are counted once per step (`num_clamped_tokens`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

BOUND = 20.0
# Inputs of a loss lie so far apart at most: more than BOUND, so that it sees which were beyond.
REACH = BOUND + 1.0
_FINITE = 1e30


def log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """Clamped log-ratio [M], to be exponentiated; without a gradient beyond the bound."""
    return (new - old).clamp(-BOUND, BOUND)


def held_log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """Clamped log-ratio [M] with slope 1 everywhere, for terms that hold policies together."""
    difference = (new - old).clamp(-_FINITE, _FINITE)
    return log_ratio(new, old).detach() + (difference - difference.detach())


def summed_log_ratio(new: Tensor, old: Tensor) -> Tensor:
    """Log-ratio [M] for sums and means over tokens: 0 above the bound, -BOUND below."""
    return held_log_ratio(new, old).masked_fill(new - old > BOUND, 0.0)


def is_beyond(new: Tensor, old: Tensor) -> Tensor:
    """True [M] where the log-ratio is clamped."""
    return (new - old).abs() > BOUND
