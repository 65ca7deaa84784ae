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
