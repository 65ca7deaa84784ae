"""Losses, behaviour correction and aggregation against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms import CORRECTIONS, LOSSES, LossInputs
from tailrace_learner.core.algorithms.aggregation import AGGREGATIONS, row_count, token_weights
from tailrace_learner.core.algorithms.losses.dapo import clipped
from tailrace_learner.core.algorithms.losses.sft import LOSS as SFT
from tailrace_learner.core.algorithms.losses.spans import NO_SPANS
from tailrace_learner.core.step.metric_sums import k3
from tests.unit.tailrace_learner.factory import config, make_rows

Array = NDArray[np.float64]


def random_inputs(size: int, seed: int) -> tuple[LossInputs, dict[str, Array]]:
    rng = np.random.default_rng(seed)
    learner_logprobs = rng.normal(-2.0, 1.0, size)
    arrays = {
        "learner_logprobs": learner_logprobs,
        "proximal_logprobs": learner_logprobs + rng.normal(0.0, 0.4, size),
        "inference_logprobs": learner_logprobs + rng.normal(0.0, 0.8, size),
        "advantages": rng.normal(0.0, 1.0, size),
    }
    tensors = {key: torch.tensor(value) for key, value in arrays.items()}
    return LossInputs(**tensors, rows=NO_SPANS, turns=NO_SPANS), arrays


def reference_clip(arrays: dict[str, Array], low: float, high: float) -> Array:
    result = np.empty_like(arrays["learner_logprobs"])
    for t, advantage in enumerate(arrays["advantages"]):
        u = np.exp(arrays["learner_logprobs"][t] - arrays["proximal_logprobs"][t])
        bounded = min(max(u, 1 - low), 1 + high)
        result[t] = -min(u * advantage, bounded * advantage)
    return result


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("name", "high"), [("ppo_clip", 0.2), ("dapo", 0.31)])
def test_clipped_losses_equal_their_formula(name: str, high: float, seed: int) -> None:
    inputs, arrays = random_inputs(200, seed)
    terms = LOSSES[name](inputs, LearnerConfig(pg_clip=0.2, pg_clip_high=0.31))
    np.testing.assert_allclose(terms.per_token, reference_clip(arrays, 0.2, high), rtol=1e-12)


def test_ppo_clip_is_dapo_with_a_symmetric_clip() -> None:
    inputs, _ = random_inputs(50, 0)
    same = LearnerConfig(pg_clip=0.2, pg_clip_high=0.2)
    assert torch.equal(
        LOSSES["ppo_clip"](inputs, same).per_token, LOSSES["dapo"](inputs, same).per_token
    )


def test_a_clipped_token_has_no_gradient_and_is_counted() -> None:
    learner_logprobs = torch.tensor([0.5, -0.5, 0.5, 0.0], requires_grad=True)
    zeros = torch.zeros(4)
    inputs = LossInputs(
        learner_logprobs,
        zeros,
        zeros,
        torch.tensor([1.0, -1.0, -1.0, 1.0]),
        rows=NO_SPANS,
        turns=NO_SPANS,
    )
    terms = clipped(inputs, 0.2, 0.2)
    terms.per_token.sum().backward()
    assert learner_logprobs.grad is not None
    assert (learner_logprobs.grad != 0).tolist() == [False, False, True, True]
    assert int(terms.counts["clip_fraction"]) == 2


def test_truncated_importance_weights_equal_their_formula() -> None:
    inputs, arrays = random_inputs(200, 1)
    weights, counts = CORRECTIONS["tis"](inputs, LearnerConfig(tis_cap=1.5))
    rho = np.exp(arrays["proximal_logprobs"] - arrays["inference_logprobs"])
    np.testing.assert_allclose(weights, np.minimum(rho, 1.5), rtol=1e-12)
    assert int(counts["tis_truncated_fraction"]) == int((rho > 1.5).sum()) > 0


def test_correction_is_on_by_default_and_none_switches_it_off() -> None:
    inputs, _ = random_inputs(10, 2)
    assert LearnerConfig().behaviour_correction == "tis"
    assert CORRECTIONS["none"](inputs, LearnerConfig())[0].tolist() == [1.0] * 10


AGGREGATED: dict[str, Callable[[list[list[float]]], float]] = {
    "token_mean": lambda rows: sum(map(sum, rows)) / sum(map(len, rows)),
    "seq_mean_token_sum": lambda rows: sum(map(sum, rows)) / len(rows),
    "seq_mean_token_mean": lambda rows: sum(sum(row) / len(row) for row in rows) / len(rows),
    "seq_mean_token_sum_norm": lambda rows: sum(sum(row) / 13 for row in rows) / len(rows),
}


@pytest.mark.parametrize("name", AGGREGATED)
def test_an_aggregation_equals_its_formula_however_rows_are_parted(name: str) -> None:
    settings = config(loss_aggregation=name, loss_norm_tokens=13)
    for seed in range(6):
        rows = make_rows(9, seed=seed)
        rng = np.random.default_rng(seed)
        losses = [rng.normal(1.0, 1.0, len(row.targets)).tolist() for row in rows]
        total = divisor = 0.0
        for part in (slice(0, 2), slice(2, 9)):
            flat = torch.tensor([x for row in losses[part] for x in row], dtype=torch.float64)
            total += float((token_weights(rows[part], settings) * flat).sum())
            divisor += row_count(rows[part], settings)
        assert total / divisor == pytest.approx(AGGREGATED[name](losses), rel=1e-6)


def test_every_aggregation_is_checked() -> None:
    assert set(AGGREGATED) == set(AGGREGATIONS)


def test_sft_is_cross_entropy() -> None:
    inputs, arrays = random_inputs(20, 4)
    np.testing.assert_allclose(SFT(inputs, LearnerConfig()).per_token, -arrays["learner_logprobs"])


def test_k3_is_never_negative_and_averages_to_the_divergence() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6)), rng.dirichlet(np.ones(6))
    estimates = k3(torch.tensor(np.log(p)), torch.tensor(np.log(q))).numpy()
    assert estimates.min() >= 0.0
    assert (p * estimates).sum() == pytest.approx((p * np.log(p / q)).sum(), rel=1e-9)
