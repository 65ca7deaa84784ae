"""Every policy loss, correction and aggregation against numpy in float64, on random ragged rows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms import LOSSES, LossInputs
from tailrace_learner.core.algorithms.aggregation import AGGREGATIONS, row_count, token_weights
from tailrace_learner.core.algorithms.corrections import corrected
from tailrace_learner.core.algorithms.kl import KL_ESTIMATORS, adapted
from tailrace_learner.core.algorithms.losses.sft import LOSS as SFT
from tailrace_learner.core.algorithms.losses.spans import Spans
from tailrace_learner.core.algorithms.losses.value_clip import value_clip
from tailrace_learner.core.algorithms.proximal import interpolated, interpolation_weights
from tests.unit.tailrace_learner.algorithms.loss_formulas import (
    CORRECTED,
    FORMULAS,
    NONE,
    SETTINGS,
    Tokens,
    weights,
)
from tests.unit.tailrace_learner.factory import config, make_rows, of_aggregation

TOLERANCE = 1e-6
ALL = {**LOSSES, "sft": SFT}
PAGE = Path(__file__).parents[4] / "docs" / "runs.md"


def made(seed: int) -> tuple[LossInputs, Tokens]:
    """Rows of 1 to 9 tokens in turns of 1 to 3; some advantages are 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 10, 8)
    size = int(lengths.sum())
    rows = np.repeat(np.arange(8), lengths)
    turns = np.concatenate(
        [100 * row + np.arange(n) // rng.integers(1, 4) for row, n in enumerate(lengths)]
    )
    learner_logprobs = rng.normal(-1.5, 0.8, size)
    advantages = np.where(rng.random(size) < 0.1, 0.0, rng.normal(0.2, 1.0, size))
    proximal_logprobs = learner_logprobs + rng.normal(0.0, 0.3, size)
    inference_logprobs = proximal_logprobs + rng.normal(0.0, 0.5, size)
    picked = rng.random(size) < 0.2
    tokens = Tokens(
        learner_logprobs, proximal_logprobs, inference_logprobs, advantages, rows, turns, picked
    )
    inputs = LossInputs(
        *(
            torch.tensor(each)
            for each in (learner_logprobs, proximal_logprobs, inference_logprobs, advantages)
        ),
        rows=Spans(lengths),
        turns=Spans(np.unique(turns, return_counts=True)[1]),
        is_picked=torch.tensor(picked, dtype=torch.float64),
    )
    inputs.learner_logprobs.requires_grad_(True)
    return inputs, tokens


def configured(name: str) -> LearnerConfig:
    chosen = {} if name == "sft" else {"loss": name}
    return LearnerConfig(**chosen, **SETTINGS[name])  # type: ignore[arg-type]


@pytest.mark.parametrize("name", FORMULAS)
def test_a_loss_equals_its_formula_as_do_its_gradient_and_its_counts(name: str) -> None:
    """All policies differ; the gradient is of losses that weigh differently."""
    config, seen = configured(name), Counter[str]()
    for seed in range(6):
        inputs, tokens = made(seed)
        terms, wanted = ALL[name](inputs, config), FORMULAS[name](tokens, config)
        np.testing.assert_allclose(terms.per_token.detach(), wanted.values, rtol=TOLERANCE, atol=1e-12)
        assert {name: int(count) for name, count in terms.counts.items()} == wanted.counts
        seen.update(wanted.counts)
        upstream = np.random.default_rng(seed).uniform(0.5, 2.0, len(tokens.p))
        (terms.per_token * torch.tensor(upstream)).sum().backward()
        assert inputs.learner_logprobs.grad is not None
        slopes = upstream @ wanted.jacobian
        np.testing.assert_allclose(inputs.learner_logprobs.grad, slopes, rtol=TOLERANCE, atol=1e-12)
    assert all(seen.values()), "a bound that no token was beyond"


def test_every_loss_that_can_be_chosen_is_checked() -> None:
    assert set(FORMULAS) == set(SETTINGS) == set(ALL)


def test_every_share_that_a_loss_or_correction_counts_is_named_on_the_page_of_metrics() -> None:
    inputs, _ = made(0)
    counted = {key for name in ALL for key in ALL[name](inputs, configured(name)).counts}
    for settings in CORRECTED.values():
        counted |= set(corrected(inputs, LearnerConfig(**settings))[1])  # type: ignore[arg-type]
    counted |= set(value_clip(*[inputs.learner_logprobs] * 3, clip=0.1).counts)
    named = set(re.findall(r"`(\w+_fraction)`", PAGE.read_text(encoding="utf-8")))
    assert named == counted


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"m2po", "topr", "tis_pg", "dppo_tv"}))
def test_on_policy_the_gradient_is_that_of_the_plain_policy_gradient(name: str) -> None:
    inputs, _ = made(0)
    learner_logprobs = inputs.learner_logprobs.detach()
    advantages = inputs.rows.means(inputs.advantages)  # the same along a row
    at_start = LossInputs(
        inputs.learner_logprobs,
        learner_logprobs,
        learner_logprobs,
        advantages,
        inputs.rows,
        inputs.turns,
        torch.zeros_like(learner_logprobs),
    )
    settings = {"loss": name, "loss_aggregation": "token_mean"}
    if LOSSES[name].off_policy:
        settings |= NONE
    LOSSES[name](at_start, LearnerConfig(**settings)).per_token.sum().backward()  # type: ignore[arg-type]
    assert inputs.learner_logprobs.grad is not None
    torch.testing.assert_close(inputs.learner_logprobs.grad, -advantages, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", sorted(set(CORRECTED) - {"none"}))
def test_a_correction_equals_its_formula_and_counts_what_it_touched(name: str) -> None:
    config, seen = LearnerConfig(**CORRECTED[name]), Counter[str]()  # type: ignore[arg-type]
    for seed in range(6):
        inputs, tokens = made(seed)
        found, counts = corrected(inputs, config)
        wanted, touched = weights(tokens, config)
        np.testing.assert_allclose(found.detach(), wanted, rtol=TOLERANCE)
        assert {name: int(count) for name, count in counts.items()} == touched
        seen.update(touched)
    assert seen
    assert all(seen.values())


def test_staleness_by_hand() -> None:
    # Learner at step 7, v_prox = 6. Tokens sampled at steps 7, 6, 5, 3: ages 0, 1, 2, 4.
    # alpha = 0, 0, (6 - 5) / (7 - 5) = 1/2, (6 - 3) / (7 - 3) = 3/4.
    alpha = interpolation_weights(np.array([0, 1, 2, 4]))
    assert alpha.tolist() == [0.0, 0.0, 0.5, 0.75]
    learner_logprobs = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    found = interpolated(
        learner_logprobs, torch.tensor([-2.0, -3.0, -2.0, -3.0]), torch.from_numpy(alpha)
    )
    assert found.tolist() == [-2.0, -3.0, -1.5, -1.5]
    assert not found.requires_grad


def test_divergence_estimators_equal_their_formulas() -> None:
    rng = np.random.default_rng(0)
    p, q = rng.normal(-2, 1, 100), rng.normal(-2, 1, 100)
    expected = {
        "k1": p - q,
        "k2": (p - q) ** 2 / 2,
        "k3": np.exp(q - p) - 1 - (q - p),
        "abs": abs(p - q),
    }
    assert set(expected) == set(KL_ESTIMATORS)
    for name, values in expected.items():
        found = KL_ESTIMATORS[name](torch.tensor(p), torch.tensor(q))
        np.testing.assert_allclose(found, values, rtol=TOLERANCE, atol=1e-12)


def test_the_adaptive_coefficient_rises_with_too_much_divergence_and_falls_with_too_little() -> None:
    assert adapted(0.1, kl=6.0, target_kl=6.0, num_samples=10, horizon=100) == pytest.approx(0.1)
    assert adapted(0.1, kl=6.6, target_kl=6.0, num_samples=10, horizon=100) == pytest.approx(0.101)
    assert adapted(0.1, kl=99.0, target_kl=6.0, num_samples=10, horizon=100) == pytest.approx(0.102)
    assert adapted(0.1, kl=0.0, target_kl=6.0, num_samples=10, horizon=100) == pytest.approx(0.098)


def test_values_are_clipped_around_the_old_ones() -> None:
    rng = np.random.default_rng(1)
    values, old, targets = rng.normal(size=(3, 50))
    terms = value_clip(*(torch.tensor(x) for x in (values, old, targets)), clip=0.3)  # type: ignore[misc]
    bounded = np.minimum(np.maximum(values, old - 0.3), old + 0.3)
    expected = 0.5 * np.maximum((values - targets) ** 2, (bounded - targets) ** 2)
    np.testing.assert_allclose(terms.per_token, expected, rtol=TOLERANCE)
    assert int(terms.counts["value_clip_fraction"]) == int(
        ((bounded - targets) ** 2 > (values - targets) ** 2).sum()
    )


def test_spans_sum_and_average_where_they_lie() -> None:
    spans = Spans(np.array([1, 3, 2]))
    values = torch.tensor([4.0, 1.0, 2.0, 6.0, 0.0, 5.0], requires_grad=True)
    assert spans.sums(values).tolist() == [4.0, 9.0, 9.0, 9.0, 5.0, 5.0]
    assert spans.means(values).tolist() == [4.0, 3.0, 3.0, 3.0, 2.5, 2.5]
    spans.means(values)[1].backward()
    assert values.grad is not None
    assert values.grad.tolist() == pytest.approx([0, 1 / 3, 1 / 3, 1 / 3, 0, 0])


AGGREGATED: dict[str, Callable[[list[list[float]]], float]] = {
    "token_mean": lambda rows: sum(map(sum, rows)) / sum(map(len, rows)),
    "seq_mean_token_sum": lambda rows: sum(map(sum, rows)) / len(rows),
    "seq_mean_token_mean": lambda rows: sum(sum(row) / len(row) for row in rows) / len(rows),
    "seq_mean_token_sum_norm": lambda rows: sum(sum(row) / 13 for row in rows) / len(rows),
}


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_an_aggregation_equals_its_formula_however_rows_are_parted(name: str) -> None:
    settings = config(**of_aggregation(name))
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
