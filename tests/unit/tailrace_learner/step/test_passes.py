"""Losses, picks, corrections and interpolation through whole passes, against numpy in float64.

The model computes in float64 as well: the reference takes its log-probabilities and their derivatives
from plain forwards of single rows, and everything after them from `loss_formulas`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch

from tailrace_learner.core.algorithms import LOSSES
from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.model.policy import PolicyModel, StartWeights
from tailrace_learner.core.step.metric_sums import MetricSums
from tailrace_learner.core.step.passes import PassRunner
from tests.unit.tailrace_learner.algorithms.loss_formulas import (
    CORRECTED,
    FORMULAS,
    SETTINGS,
    Array,
    candidates,
    picks,
    weights,
)
from tests.unit.tailrace_learner.algorithms.plain_pass import plain_outputs, shares, tokens_of
from tests.unit.tailrace_learner.factory import (
    config,
    make_double_policy,
    make_rows,
    of_aggregation,
)

TOLERANCE = 1e-6
AGGREGATIONS = ("token_mean", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")


@dataclass
class World:
    """A policy, rows on which three policies differ, and what a plain forward of each row gives."""

    policy: PolicyModel
    rows: list[TrainingRow]
    learner_logprobs: Array  # [M]
    entropy: Array  # [M]
    of_log_pi: Array  # [M, P] derivatives by the weights
    of_entropy: Array  # [M, P]


def derivatives(outputs: Iterable[torch.Tensor], policy: PolicyModel) -> Array:
    rows = [torch.autograd.grad(each, policy.parameters, retain_graph=True) for each in outputs]
    return np.stack([torch.cat([g.flatten() for g in row]).numpy() for row in rows])


@pytest.fixture(scope="module")
def world() -> World:
    policy, rows = make_double_policy(), make_rows(7, seed=3, max_len=16)
    rng = np.random.default_rng(0)
    outputs = [plain_outputs(policy, row) for row in rows]
    for row, (learner_logprobs, _) in zip(rows, outputs, strict=True):
        size = len(row.targets)
        row.proximal_logprobs = (learner_logprobs.detach().numpy() + rng.normal(0, 0.3, size)).astype(
            np.float32
        )
        row.inference_logprobs = (row.proximal_logprobs + rng.normal(0, 0.4, size)).astype(np.float32)
        row.advantages = row.advantages + np.float32(0.4)  # not 0 on average
        row.staleness = rng.integers(0, 5, size)
        row.turns = 2 + np.sort(rng.integers(0, 3, size))  # turns may have no trained token
    learner_logprobs, entropy = (torch.cat(parts) for parts in zip(*outputs, strict=True))
    slopes, of_entropy = derivatives(learner_logprobs, policy), derivatives(entropy, policy)
    known = (learner_logprobs.detach().numpy(), entropy.detach().numpy())
    return World(policy, rows, *known, slopes, of_entropy)


def passes() -> list[dict[str, Any]]:
    """Every loss, and every correction with another one, with both kinds of proximal policy."""
    losses = [{"loss": loss, **SETTINGS[loss]} for loss in FORMULAS if loss != "sft"]
    plain = {"loss": "dapo", **SETTINGS["dapo"]}
    cases = [*losses, *(plain | corrected for corrected in CORRECTED.values())]
    ways = cycle(AGGREGATIONS)
    return [
        {**case, "proximal_logprobs": proximal, **of_aggregation(next(ways))}
        for proximal in ("recompute", "interpolate")
        for case in cases
    ]


def named(settings: dict[str, Any]) -> str:
    correction = settings.get("behaviour_correction", "tis")
    return f"{settings['loss']}-{correction}-{settings['proximal_logprobs']}"


@pytest.mark.parametrize("settings", passes(), ids=named)
def test_a_pass_over_ragged_rows_gives_the_loss_and_gradient_that_numpy_does(
    world: World, settings: dict[str, Any]
) -> None:
    common = {"entropy_loss_coef": 0.03, "max_tokens_per_micro_batch": 40}
    given = config(**common, **settings)
    policy, rows, sums = world.policy, [replace(row) for row in world.rows], MetricSums()
    runner = PassRunner(policy, LOSSES[given.loss], given, StartWeights(policy.parameters))
    if selects := given.policy_loss.selects:
        runner.pick(selects, rows)
    policy.model.zero_grad(set_to_none=True)
    parts = list(runner.micro_batches(rows))
    assert len(parts) > 1
    total = sum(runner.run(part, sums, is_first=True) for part in parts)
    gradient = torch.cat([parameter.grad.flatten() for parameter in policy.parameters]).numpy()

    tokens = tokens_of(rows, world.learner_logprobs, given)
    wanted, (factors, touched) = FORMULAS[given.loss](tokens, given), weights(tokens, given)
    weighed = shares(rows, given)
    value = (weighed * (factors * wanted.values - 0.03 * world.entropy)).sum()
    slopes = (weighed * factors) @ wanted.jacobian
    expected = slopes @ world.of_log_pi - 0.03 * (weighed @ world.of_entropy)
    assert total == pytest.approx(value, rel=TOLERANCE)
    assert np.linalg.norm(gradient - expected) < TOLERANCE * np.linalg.norm(expected)
    counts = wanted.counts | touched
    found = sums.means()
    assert {name: found[name] for name in counts} == {
        name: pytest.approx(count / len(tokens.p)) for name, count in counts.items()
    }


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        *((loss, SETTINGS[loss]) for loss in LOSSES if LOSSES[loss].selects),
        ("clip_cov", {"cov_fraction": 0.1, "clip_cov_low": -9.0, "clip_cov_high": 9.0}),
    ],
)
@pytest.mark.parametrize("proximal", ["recompute", "interpolate"])
def test_a_mini_batch_picks_the_tokens_that_numpy_does(
    world: World, loss: Any, settings: dict[str, Any], proximal: Any
) -> None:
    given = config(loss=loss, proximal_logprobs=proximal, max_tokens_per_micro_batch=40, **settings)
    rows, policy = [replace(row) for row in world.rows], world.policy
    runner = PassRunner(policy, LOSSES[loss], given, StartWeights(policy.parameters))
    assert given.policy_loss.selects is not None
    runner.pick(given.policy_loss.selects, rows[::-1])
    tokens = tokens_of(rows, world.learner_logprobs, given)
    found = set(np.flatnonzero(tokens.picked).tolist())
    can_be_picked = candidates(tokens, given) if loss == "clip_cov" else set()
    num_picked = max(int(len(tokens.p) * settings.get("cov_fraction", 0.0)), 1)
    if len(can_be_picked) > num_picked:  # draws decide
        assert found < can_be_picked
        assert len(found) == num_picked
    else:
        assert found == picks(loss, tokens, given, np.zeros(len(tokens.p)))
    assert 0 < len(found) < len(tokens.p)


@pytest.mark.parametrize("keeps_proximal", [False, True])
def test_tokens_without_a_logprob_count_as_sampled_by_the_start_weights(
    world: World, keeps_proximal: bool
) -> None:
    """Their gradient is that of rows that report the start's own log-probabilities."""
    given = config(loss="dapo", behaviour_correction="tis", max_tokens_per_micro_batch=40)
    ends = np.cumsum([len(row.targets) for row in world.rows])[:-1]
    gradients = []
    for is_known in (True, False):
        rows = []
        for row, own in zip(world.rows, np.split(world.learner_logprobs, ends), strict=True):
            start = row.proximal_logprobs if keeps_proximal else own.astype(np.float32)
            assert start is not None
            reported = start if is_known else np.full_like(start, np.nan)
            kept = start if keeps_proximal else None
            rows.append(replace(row, inference_logprobs=reported, proximal_logprobs=kept))
        policy = world.policy
        runner = PassRunner(policy, LOSSES[given.loss], given, StartWeights(policy.parameters))
        policy.model.zero_grad(set_to_none=True)
        for part in list(runner.micro_batches(rows)):
            runner.run(part, MetricSums(), is_first=True)
        grads = [parameter.grad.flatten() for parameter in policy.parameters]
        gradients.append(torch.cat(grads).numpy())
    largest = np.abs(gradients[0]).max()  # sums of parts of this size, rounded as the processor does it
    np.testing.assert_allclose(gradients[1], gradients[0], rtol=0.0, atol=1e-5 * largest)
    assert largest > 1e-4
