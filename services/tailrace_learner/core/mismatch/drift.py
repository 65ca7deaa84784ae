"""Errors of inference servers: does each server sample with the weights that it reports?

With the weights of a token's version, engine and learner compute the same log-probability. The
difference is arithmetic (float32 1e-6, bfloat16 1e-2) or a server that has gone wrong. The error is
the mean of |log pi - log mu|, at most 5 per token, and not the divergence: it is linear in the fault,
its normal size is known, and no verdict is due to a token in a hundred that is reported as impossible.

A step's own passes read the tokens of the version that the step begins with. A sample of older ones
is read under weights that were kept (`core/mismatch/old_readings.py`). Other tokens say nothing about
a server, nor do those that a guide bound: the engine reports them as likelier than the free model would
sample them. `core/mismatch/sentinel.py` judges by the sums.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.core.algorithms.ratios import log_ratio
from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.step.metric_sums import MetricSums, k3
from tailrace_protos.control import is_bound

DRIFT = "drift/"
MOMENTS = "moments/"
_MOST = 5.0  # error of a token
_LEAST_VARIANCE = 1e-12  # squared nats; smaller ones are rounding errors
Sums = Mapping[tuple[str, int], tuple[float, float]]  # by source and age: summed errors, their number


def add_errors(
    sums: MetricSums,
    rows: Sequence[TrainingRow],
    inference_logprobs: Tensor,
    learner_logprobs: Tensor,
    counted: NDArray[np.bool_],
    age: int,
) -> None:
    """Adds the errors of servers and of numerics on the `counted` [M] tokens of `rows`.

    `learner_logprobs` [M]: under the weights of `age` steps ago, which are those of the counted
    tokens.
    """
    on_own = torch.from_numpy(counted).to(learner_logprobs.device)
    sums.add("mismatch_kl", k3(inference_logprobs, learner_logprobs)[on_own].sum(), int(counted.sum()))
    _add_moments(sums, inference_logprobs[on_own].double(), learner_logprobs[on_own].double())
    errors = log_ratio(learner_logprobs.double(), inference_logprobs.double()).abs().clamp(max=_MOST)
    for source, total, count in drift_sums(rows, errors, counted):
        sums.add(f"{DRIFT}{age} {source}", total, count)


def _add_moments(sums: MetricSums, inference: Tensor, learner: Tensor) -> None:
    """Adds the sums behind `correlation`, over tokens [m] with finite log-probabilities in both."""
    finite = torch.isfinite(inference) & torch.isfinite(learner)
    x, y = inference[finite], learner[finite]
    moments = {"x": x, "y": y, "xx": x * x, "yy": y * y, "xy": x * y}
    for name, values in moments.items():
        sums.add(f"{MOMENTS}{name}", values.sum(), len(values))


def correlation(sums: MetricSums) -> float | None:
    """Pearson correlation of the log-probabilities that `add_errors` compared.

    Takes their sums out. None where all values of one side are alike, or nothing was compared.
    """
    means = sums.split(MOMENTS).means()
    if not means:
        return None
    covariance = means["xy"] - means["x"] * means["y"]
    variances = [means["xx"] - means["x"] ** 2, means["yy"] - means["y"] ** 2]
    if min(variances) <= _LEAST_VARIANCE:
        return None
    return min(1.0, max(-1.0, covariance / math.sqrt(variances[0] * variances[1])))


def of_sources(totals: Mapping[str, tuple[float, float]]) -> Sums:
    """Sums that `add_errors` added, by source and age; names come without their prefix."""
    parts = {name: name.partition(" ") for name in totals}
    return {(source, int(age)): totals[name] for name, (age, _, source) in parts.items()}


def drift_sums(
    rows: Sequence[TrainingRow], errors: Tensor, matched: NDArray[np.bool_]
) -> Iterator[tuple[str, Tensor, int]]:
    """Sum of `errors` [M] over each source's version-matched tokens, and their number."""
    names, owners = owners_of(rows)
    if not names or not matched.any():
        return
    counted = matched & (owners >= 0)
    counts = np.bincount(owners[counted], minlength=len(names))
    places = torch.from_numpy(owners[counted]).to(errors.device)
    read = errors[torch.from_numpy(np.flatnonzero(counted)).to(errors.device)].double()
    sums = torch.zeros(len(names), dtype=torch.float64, device=errors.device)
    sums.index_add_(0, places, read)
    for place, name in enumerate(names):
        if counts[place]:
            yield name, sums[place], int(counts[place])


def owners_of(rows: Sequence[TrainingRow]) -> tuple[list[str], NDArray[np.int64]]:
    """All sources of the rows, and the place of each target's source [M], -1 if unknown or bound."""
    places: dict[str, int] = {}
    owners = [_owners(row, places) for row in rows]
    return list(places), np.concatenate(owners)


def _owners(row: TrainingRow, places: dict[str, int]) -> NDArray[np.int64]:
    """Place [M] of each target's source in `places`; adds new sources to it."""
    if not row.spans:
        return np.full(len(row.targets), -1, np.int64)
    found = [
        -1 if not s.source or is_bound(s.source) else places.setdefault(s.source, len(places))
        for s in row.spans
    ]
    return np.repeat(np.array(found, np.int64), [span.num_tokens for span in row.spans])
