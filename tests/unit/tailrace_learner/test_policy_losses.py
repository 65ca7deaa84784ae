"""Every policy loss and correction against plain Python in float64, on random ragged rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_algorithm import OFF_POLICY_LOSSES
from tailrace_learner.core.correction import corrected
from tailrace_learner.core.kl import KL_ESTIMATORS, adapted
from tailrace_learner.core.losses import LOSSES, SELECTIONS, BatchTokens, LossInputs, Spans
from tailrace_learner.core.losses.value_clip import value_clip
from tailrace_learner.core.proximal import interpolated, interpolation_weights

TOLERANCE = 1e-6
Token = dict[str, float]  # p (log pi), o (log pi_old), m (log mu), a (advantage), k (picked)
Row = list[Token]


def made(seed: int) -> tuple[LossInputs, list[Row], NDArray[np.int64]]:
    """Rows of 1 to 9 tokens in turns of 1 to 3; some advantages are 0."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 10, 8)
    turns = [np.minimum(np.arange(n) // rng.integers(1, 4), n) for n in lengths]
    size = int(lengths.sum())
    arrays = {
        "log_pi": rng.normal(-1.5, 0.8, size),
        "advantages": np.where(rng.random(size) < 0.1, 0.0, rng.normal(size=size)),
        "is_picked": (rng.random(size) < 0.2).astype(float),
    }
    arrays["log_pi_old"] = arrays["log_pi"] + rng.normal(0.0, 0.3, size)
    arrays["log_mu"] = arrays["log_pi_old"] + rng.normal(0.0, 0.5, size)
    keys = {"p": "log_pi", "o": "log_pi_old", "m": "log_mu", "a": "advantages", "k": "is_picked"}
    flat = [{k: float(arrays[v][t]) for k, v in keys.items()} for t in range(size)]
    owners = np.concatenate([turn + 100 * row for row, turn in enumerate(turns)])
    tokens = iter(flat)
    rows = [[next(tokens) for _ in range(n)] for n in lengths]
    inputs = LossInputs(
        **{key: torch.tensor(value, dtype=torch.float64) for key, value in arrays.items()},
        rows=Spans(lengths),
        turns=Spans(np.unique(owners, return_counts=True)[1]),
    )
    inputs.log_pi.requires_grad_(True)
    return inputs, rows, owners


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def surrogate(ratio: float, advantage: float, low: float, high: float) -> float:
    return -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)


def dual(value: float, advantage: float, bound: float) -> float:
    return min(value, -bound * advantage) if bound and advantage < 0 else value


def mean(values: Iterator[float] | list[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


def per_token(of: Callable[[Token], float]) -> Callable[[Row], list[float]]:
    return lambda row: [of(t) for t in row]


def u(t: Token) -> float:
    return math.exp(t["p"] - t["o"])


def per_row(ratio: Callable[[Row], float], of: Callable[[Token, float], float]) -> Any:
    return lambda row: [of(t, ratio(row)) for t in row]


def sapo(t: Token) -> float:
    tau = 0.8 if t["a"] > 0 else 1.3
    return -4 / tau / (1 + math.exp(-tau * (u(t) - 1))) * t["a"]


def gmpo(row: Row) -> list[float]:
    def bounded(t: Token, advantage: float) -> float:
        d = t["p"] - t["o"]
        return max(d, -0.2) if advantage < 0 else min(d, 0.2)

    weight = math.exp(mean(bounded(t, t["a"]) for t in row))
    return [-t["a"] * weight for t in row]


def topr(row: Row) -> list[float]:
    ratio = math.exp(sum(t["p"] - t["m"] for t in row))
    return [-(1.0 if t["a"] > 0 else min(ratio, 1.0)) * t["a"] * t["p"] for t in row]


def kimi(row: Row) -> list[float]:
    total = sum(t["p"] - t["o"] for t in row)
    return [-t["a"] * t["p"] + 0.15 * total * (t["p"] - t["o"]) for t in row]


def dppo(t: Token) -> float:
    change = math.exp(t["p"]) - math.exp(t["m"])
    dropped = (t["a"] > 0 and change > 0.05) or (t["a"] < 0 and -change > 0.05)
    keep = 0.0 if dropped else 1.0
    return -keep * math.exp(t["p"] - t["m"]) * t["a"] + 0.3 * (t["p"] - t["m"]) ** 2


NONE = {"behaviour_correction": "none"}
CASES: dict[str, tuple[dict[str, Any], Callable[[Row], list[float]]]] = {
    "vanilla_pg": ({}, per_token(lambda t: -t["a"] * t["p"])),
    "ppo_clip": (
        {"pg_clip": 0.1, "dual_clip": 1.2},
        per_token(lambda t: dual(surrogate(u(t), t["a"], 0.1, 0.1), t["a"], 1.2)),
    ),
    "dapo": (
        {"pg_clip": 0.1, "pg_clip_high": 0.3},
        per_token(lambda t: surrogate(u(t), t["a"], 0.1, 0.3)),
    ),
    "grpo": (
        {"pg_clip": 0.15, "pg_clip_high": 0.4, "dual_clip": 1.3},
        per_token(lambda t: dual(surrogate(u(t), t["a"], 0.15, 0.15), t["a"], 1.3)),
    ),
    "decoupled_ppo": (
        {"tis_cap": 1.5, **NONE},
        per_token(lambda t: min(math.exp(t["o"] - t["m"]), 1.5) * surrogate(u(t), t["a"], 0.2, 0.2)),
    ),
    "gspo": (
        {"gspo_clip": 0.05, "gspo_clip_high": 0.07},
        per_row(
            lambda row: math.exp(mean(t["p"] - t["o"] for t in row)),
            lambda t, s: surrogate(s, t["a"], 0.05, 0.07),
        ),
    ),
    "gmpo": ({"gmpo_clip": 0.2}, gmpo),
    "cispo": (
        {"cispo_clip": 0.3, "cispo_clip_high": 0.2},
        per_token(lambda t: -clip(u(t), 0.7, 1.2) * t["a"] * t["p"]),
    ),
    "sapo": ({"sapo_tau": 0.8, "sapo_tau_negative": 1.3}, per_token(sapo)),
    "tis_pg": (
        {"tis_cap": 1.3, **NONE},
        per_token(lambda t: -min(math.exp(t["p"] - t["m"]), 1.3) * t["a"] * t["p"]),
    ),
    "topr": (NONE, topr),
    "kimi15": ({"kimi_tau": 0.3}, kimi),
    "m2po": (NONE, per_token(lambda t: -(1 - t["k"]) * math.exp(t["p"] - t["m"]) * t["a"])),
    "kl_cov": (
        {"kl_cov_coef": 0.7},
        per_token(lambda t: -u(t) * t["a"] + 0.7 * t["k"] * abs(t["p"] - t["o"])),
    ),
    "clip_cov": ({}, per_token(lambda t: (1 - t["k"]) * surrogate(u(t), t["a"], 0.2, 0.28))),
    "dppo_tv": ({"dppo_delta": 0.05, "dppo_kl_coef": 0.3, **NONE}, per_token(dppo)),
    "sft": ({}, per_token(lambda t: -t["p"])),
}


@pytest.mark.parametrize("name", [*CASES, "segment"])
def test_a_loss_equals_its_formula(name: str) -> None:
    for seed in range(6):
        inputs, rows, owners = made(seed)
        if name == "segment":
            flat = [t for row in rows for t in row]
            turns = [[flat[i] for i in np.flatnonzero(owners == turn)] for turn in np.unique(owners)]
            config = LearnerConfig(loss="segment", pg_clip=0.1, pg_clip_high=0.2)
            expected = [
                surrogate(math.exp(mean(x["p"] - x["o"] for x in turn)), t["a"], 0.1, 0.2)
                for turn in turns
                for t in turn
            ]
        else:
            settings, reference = CASES[name]
            chosen = {} if name == "sft" else {"loss": name}
            config = LearnerConfig(**chosen, **settings)
            expected = [value for row in rows for value in reference(row)]
        terms = LOSSES[name](inputs, config)
        found = terms.per_token.detach().numpy()
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=1e-12)
        assert all(0 <= int(count) <= len(found) for count in terms.counts.values())


def test_every_loss_that_can_be_chosen_is_checked() -> None:
    assert {*CASES, "segment"} == set(LOSSES)
    assert set(LOSSES) >= OFF_POLICY_LOSSES


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"sft", "m2po", "topr", "tis_pg", "dppo_tv"}))
def test_on_policy_the_gradient_is_that_of_the_plain_policy_gradient(name: str) -> None:
    inputs, _, _ = made(0)
    log_pi = inputs.log_pi.detach()
    advantages = inputs.rows.means(inputs.advantages)  # the same along a row
    at_start = LossInputs(
        inputs.log_pi,
        log_pi,
        log_pi,
        advantages,
        inputs.rows,
        inputs.turns,
        torch.zeros_like(log_pi),
    )
    settings = {"loss": name, "loss_aggregation": "token_mean"}
    if name in OFF_POLICY_LOSSES:
        settings |= NONE
    LOSSES[name](at_start, LearnerConfig(**settings)).per_token.sum().backward()  # type: ignore[arg-type]
    assert inputs.log_pi.grad is not None
    torch.testing.assert_close(inputs.log_pi.grad, -advantages, rtol=1e-6, atol=1e-9)


def test_sequence_ratios_follow_every_token_of_their_row() -> None:
    inputs, rows, _ = made(2)
    config = LearnerConfig(loss="gspo", gspo_clip=10.0, gspo_clip_high=10.0)
    LOSSES["gspo"](inputs, config).per_token.sum().backward()
    expected = [-math.exp(mean(x["p"] - x["o"] for x in row)) * t["a"] for row in rows for t in row]
    assert inputs.log_pi.grad is not None
    np.testing.assert_allclose(inputs.log_pi.grad.numpy(), expected, rtol=TOLERANCE, atol=1e-12)


def batch(log_pi: list[float], log_mu: list[float], advantages: list[float]) -> BatchTokens:
    size = len(log_pi)
    return BatchTokens(
        np.array(log_pi),
        np.array(log_pi),
        np.array(log_mu),
        np.array(advantages),
        np.linspace(0.9, 0.1, size),
    )


def test_m2po_leaves_out_the_farthest_tokens_until_the_second_moment_is_small() -> None:
    # d = 0.6, -0.5, 0.4, 0.1, -0.9; the last moves against its advantage, so nothing could hold it back
    tokens = batch([-1.0] * 5, [-1.6, -0.5, -1.4, -1.1, -0.1], [1.0, -1.0, 1.0, 1.0, 1.0])
    squares = [0.36, 0.25, 0.16, 0.01, 0.81]
    for threshold, left_out in ((0.4, []), (0.31, [0]), (0.33, []), (0.328, [0]), (0.1, [0, 1, 2, 3])):
        config = LearnerConfig(loss="m2po", m2_threshold=threshold, **NONE)  # type: ignore[arg-type]
        picked = SELECTIONS["m2po"](tokens, config)
        kept = [s for s, out in zip(squares, picked, strict=True) if not out]
        expected = [] if mean(squares) <= threshold else left_out
        assert np.flatnonzero(picked).tolist() == expected
        assert mean(kept) <= threshold or kept == [0.81]


def test_covariance_picks_tokens_that_are_likely_and_good_or_unlikely_and_bad() -> None:
    tokens = batch([-0.1, -3.0, -0.1, -3.0, -1.0], [0.0] * 5, [2.0, -1.5, -2.0, 1.5, 0.0])
    config = LearnerConfig(loss="kl_cov", cov_fraction=0.4)
    assert np.flatnonzero(SELECTIONS["kl_cov"](tokens, config)).tolist() == [0, 1]
    least = LearnerConfig(loss="kl_cov", cov_fraction=0.0)
    assert np.flatnonzero(SELECTIONS["kl_cov"](tokens, least)).tolist() == [0]
    band = LearnerConfig(loss="clip_cov", cov_fraction=0.2, clip_cov_low=1.0, clip_cov_high=5.0)
    assert np.flatnonzero(SELECTIONS["clip_cov"](tokens, band)).tolist() == [1]  # the lower draw
    narrow = LearnerConfig(loss="clip_cov", cov_fraction=0.2, clip_cov_low=2.5, clip_cov_high=9.0)
    assert np.flatnonzero(SELECTIONS["clip_cov"](tokens, narrow)).tolist() == [0]
    nobody = LearnerConfig(loss="clip_cov", clip_cov_low=8.0, clip_cov_high=9.0)
    assert not SELECTIONS["clip_cov"](tokens, nobody).any()


CORRECTED: dict[str, tuple[dict[str, Any], Callable[[Row, Token], float]]] = {
    "tis": ({"tis_cap": 1.2}, lambda row, t: min(math.exp(t["o"] - t["m"]), 1.2)),
    "tis_sequence": (
        {"behaviour_correction": "tis", "tis_cap": 1.2, "correction_level": "sequence"},
        lambda row, t: min(math.exp(sum(x["o"] - x["m"] for x in row)), 1.2),
    ),
    "mis": (
        {"behaviour_correction": "mis", "tis_cap": 1.2},
        lambda row, t: r if (r := math.exp(t["o"] - t["m"])) <= 1.2 else 0.0,
    ),
    "mis_sequence": (
        {"behaviour_correction": "mis", "tis_cap": 1.4, "correction_level": "sequence"},
        lambda row, t: r if (r := math.exp(sum(x["o"] - x["m"] for x in row))) <= 1.4 else 0.0,
    ),
    "icepop": (
        {"behaviour_correction": "icepop", "icepop_low": 0.7, "icepop_high": 1.4},
        lambda row, t: r if 0.7 <= (r := math.exp(t["o"] - t["m"])) <= 1.4 else 0.0,
    ),
    "geometric": (
        {**NONE, "geometric_mask": 0.1},
        lambda row, t: float(1 / 1.1 <= math.exp(mean(x["o"] - x["m"] for x in row)) <= 1.1),
    ),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_a_correction_equals_its_formula_and_counts_what_it_touched(name: str) -> None:
    settings, reference = CORRECTED[name]
    total = 0
    for seed in range(6):
        inputs, rows, _ = made(seed)
        weights, counts = corrected(inputs, LearnerConfig(**settings))
        expected = [reference(row, t) for row in rows for t in row]
        np.testing.assert_allclose(weights.detach().numpy(), expected, rtol=TOLERANCE)
        (count,) = counts.values()
        untouched = {"tis": 1.2, "tis_sequence": 1.2}.get(name, 0.0)
        assert int(count) == sum(value == pytest.approx(untouched) for value in expected)
        total += int(count)
    assert total > 0


def test_staleness_by_hand() -> None:
    # Learner at step 7, v_prox = 6. Tokens sampled at steps 7, 6, 5, 3: ages 0, 1, 2, 4.
    # alpha = 0, 0, (6 - 5) / (7 - 5) = 1/2, (6 - 3) / (7 - 3) = 3/4.
    alpha = interpolation_weights(np.array([0, 1, 2, 4]))
    assert alpha.tolist() == [0.0, 0.0, 0.5, 0.75]
    log_pi = torch.tensor([-1.0, -1.0, -1.0, -1.0], requires_grad=True)
    found = interpolated(log_pi, torch.tensor([-2.0, -3.0, -2.0, -3.0]), torch.from_numpy(alpha))
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
    assert [b - a for a, b in pairwise([0, 1, 4, 6])] == spans.lengths.tolist()
