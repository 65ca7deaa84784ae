"""Group-relative advantages against plain float64 arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.advantages import ESTIMATORS, Returns, Verdict

grpo = ESTIMATORS["grpo"]


def returns(rewards: list[float], valid: list[bool], seed: int = 0) -> Returns:
    rng = np.random.default_rng(seed)
    masks = tuple((rng.random(rng.integers(1, 9)) < 0.7).astype(np.uint8) for _ in rewards)
    return Returns(np.array(rewards), np.array(valid), masks)


@given(
    st.lists(st.tuples(st.floats(-100, 100, width=32), st.booleans()), min_size=1, max_size=12),
    st.booleans(),
)
def test_every_policy_token_of_a_valid_member_gets_its_deviation_from_the_group(
    members: list[tuple[float, bool]], norm_std: bool
) -> None:
    given_returns = returns([r for r, _ in members], [v for _, v in members])
    result = grpo(given_returns, LearnerConfig(norm_std=norm_std))
    pool = [reward for reward, valid in members if valid]
    for (reward, valid), mask, tokens in zip(
        members, given_returns.loss_masks, result.per_token, strict=True
    ):
        expected = 0.0
        if valid and len(set(pool)) > 1:
            mean = sum(pool) / len(pool)
            std = (sum((r - mean) ** 2 for r in pool) / (len(pool) - 1)) ** 0.5
            expected = (reward - mean) / ((std + 1e-6) if norm_std else 1.0)
        np.testing.assert_allclose(tokens, expected * mask, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("rewards", "valid", "verdict"),
    [
        ([1.0], [True], Verdict.TOO_FEW_VALID),
        ([1.0, 0.0], [True, False], Verdict.TOO_FEW_VALID),
        ([1.0, 1.0, 0.0], [True, True, False], Verdict.ZERO_VARIANCE),
        ([1.0, 0.0], [True, True], Verdict.TRAIN),
    ],
)
def test_groups_that_teach_nothing_are_named(
    rewards: list[float], valid: list[bool], verdict: Verdict
) -> None:
    result = grpo(returns(rewards, valid), LearnerConfig())
    assert result.verdict is verdict
    assert (verdict is Verdict.TRAIN) == any(tokens.any() for tokens in result.per_token)


def test_an_invalid_members_reward_changes_nothing() -> None:
    one = grpo(returns([1.0, 0.0, 0.0], [True, True, False]), LearnerConfig())
    other = grpo(returns([1.0, 0.0, 1e9], [True, True, False]), LearnerConfig())
    for left, right in zip(one.per_token, other.per_token, strict=True):
        np.testing.assert_array_equal(left, right)
