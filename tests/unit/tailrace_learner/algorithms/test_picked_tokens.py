"""Tokens that a loss treats differently, as it picks them over a whole mini-batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms import LOSSES, BatchTokens
from tests.unit.tailrace_learner.algorithms.loss_formulas import NONE, SETTINGS, Tokens, picks


def selects(name: str) -> Callable[[BatchTokens, LearnerConfig], NDArray[np.bool_]]:
    found = LOSSES[name].selects
    assert found is not None
    return found


def drawn(seed: int) -> tuple[BatchTokens, Tokens]:
    """Tokens of which current, proximal and sampling policy differ, good ones being in the majority."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(1, 60))
    learner_logprobs = rng.normal(-2.0, 1.0, size)
    proximal_logprobs = learner_logprobs + rng.normal(0.0, 0.3, size)
    inference_logprobs = proximal_logprobs + rng.normal(0.0, 0.4, size)
    advantages = np.where(rng.random(size) < 0.1, 0.0, rng.normal(0.8, 1.0, size))
    alone = np.arange(size)
    tokens = Tokens(
        learner_logprobs, proximal_logprobs, inference_logprobs, advantages, alone, alone, alone < 0
    )
    return BatchTokens(
        learner_logprobs, proximal_logprobs, inference_logprobs, advantages, rng.random(size)
    ), tokens


@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        *((loss, SETTINGS[loss]) for loss in LOSSES if LOSSES[loss].selects),
        ("clip_cov", {"cov_fraction": 0.1, "clip_cov_low": -1.0, "clip_cov_high": 0.3}),
        ("m2po", {"m2_threshold": 1e-6, **NONE}),
    ],
)
def test_a_selection_picks_what_its_rule_says(loss: str, settings: dict[str, object]) -> None:
    config = LearnerConfig(loss=loss, **settings)  # type: ignore[arg-type]
    num_picked = 0
    for seed in range(40):
        batch, tokens = drawn(seed)
        found = set(np.flatnonzero(selects(loss)(batch, config)).tolist())
        assert found == picks(loss, tokens, config, batch.draws)
        num_picked += len(found)
    assert num_picked > 40


def batch(
    learner_logprobs: list[float], inference_logprobs: list[float], advantages: list[float]
) -> BatchTokens:
    size = len(learner_logprobs)
    return BatchTokens(
        np.array(learner_logprobs),
        np.array(learner_logprobs),
        np.array(inference_logprobs),
        np.array(advantages),
        np.linspace(0.9, 0.1, size),
    )


def test_m2po_leaves_out_the_farthest_tokens_until_the_second_moment_is_small() -> None:
    # d = 0.6, -0.5, 0.4, 0.1, -0.9; the last moves against its advantage, so nothing could hold it back
    tokens = batch([-1.0] * 5, [-1.6, -0.5, -1.4, -1.1, -0.1], [1.0, -1.0, 1.0, 1.0, 1.0])
    squares = [0.36, 0.25, 0.16, 0.01, 0.81]
    for threshold, left_out in ((0.4, []), (0.31, [0]), (0.33, []), (0.328, [0]), (0.1, [0, 1, 2, 3])):
        config = LearnerConfig(loss="m2po", m2_threshold=threshold, **NONE)  # type: ignore[arg-type]
        picked = selects("m2po")(tokens, config)
        kept = [s for s, out in zip(squares, picked, strict=True) if not out]
        expected = [] if np.mean(squares) <= threshold else left_out
        assert np.flatnonzero(picked).tolist() == expected
        assert np.mean(kept) <= threshold or kept == [0.81]


def test_covariance_picks_tokens_that_are_likely_and_good_or_unlikely_and_bad() -> None:
    tokens = batch([-0.1, -3.0, -0.1, -3.0, -1.0], [0.0] * 5, [2.0, -1.5, -2.0, 1.5, 0.0])
    config = LearnerConfig(loss="kl_cov", cov_fraction=0.4)
    assert np.flatnonzero(selects("kl_cov")(tokens, config)).tolist() == [0, 1]
    least = LearnerConfig(loss="kl_cov", cov_fraction=0.0)
    assert np.flatnonzero(selects("kl_cov")(tokens, least)).tolist() == [0]
    band = LearnerConfig(loss="clip_cov", cov_fraction=0.2, clip_cov_low=1.0, clip_cov_high=5.0)
    assert np.flatnonzero(selects("clip_cov")(tokens, band)).tolist() == [1]  # the lower draw
    narrow = LearnerConfig(loss="clip_cov", cov_fraction=0.2, clip_cov_low=2.5, clip_cov_high=9.0)
    assert np.flatnonzero(selects("clip_cov")(tokens, narrow)).tolist() == [0]
    nobody = LearnerConfig(loss="clip_cov", clip_cov_low=8.0, clip_cov_high=9.0)
    assert not selects("clip_cov")(tokens, nobody).any()
