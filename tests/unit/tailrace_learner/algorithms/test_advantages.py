"""Group-relative advantages against plain float64 arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms import ESTIMATORS, Returns, Verdict

grpo = ESTIMATORS["grpo"]


def returns(
    rewards: list[float],
    valid: list[bool],
    rows: list[list[float]] | None = None,
    density: float = 0.7,
) -> Returns:
    """Members of one row each, unless `rows` gives the returns of their rows."""
    rng = np.random.default_rng(0)
    row_rewards = [[reward] for reward in rewards] if rows is None else rows
    masks = tuple(
        tuple((rng.random(rng.integers(1, 9)) < density).astype(np.uint8) for _ in member)
        for member in row_rewards
    )
    return Returns(np.array(rewards), np.array(valid), tuple(map(np.array, row_rewards)), masks)


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
    for (reward, valid), (mask,), (tokens,) in zip(
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
    assert (verdict is Verdict.TRAIN) == any(tokens.any() for (tokens,) in result.per_token)


def test_an_invalid_members_reward_changes_nothing() -> None:
    one = grpo(returns([1.0, 0.0, 0.0], [True, True, False]), LearnerConfig())
    other = grpo(returns([1.0, 0.0, 1e9], [True, True, False]), LearnerConfig())
    for (left,), (right,) in zip(one.per_token, other.per_token, strict=True):
        np.testing.assert_array_equal(left, right)


def test_statistics_are_over_episodes_however_many_rows_each_has() -> None:
    rows = [[1.0] * 7, [0.0], [0.0]]
    result = grpo(returns([1.0, 0.0, 0.0], [True] * 3, rows, density=1.0), LearnerConfig())
    one_each = grpo(returns([1.0, 0.0, 0.0], [True] * 3, density=1.0), LearnerConfig())
    for many, (one,) in zip(result.per_token, one_each.per_token, strict=True):
        assert {value for tokens in many for value in tokens} == {one[0]}


def test_a_row_is_compared_by_the_return_credited_to_it() -> None:
    asked = returns([1.0, 0.0], [True, True], [[0.5, 1.0], [0.0]])
    result = grpo(asked, LearnerConfig())
    scale = 0.5**0.5 + 1e-6
    for row, expected in enumerate((0.0, 0.5 / scale)):
        np.testing.assert_allclose(result.per_token[0][row], expected * asked.loss_masks[0][row])


def test_equal_returns_teach_nothing_even_where_rows_are_discounted() -> None:
    third = 0.1 + 0.2  # not 0.3, by rounding
    result = grpo(returns([0.3, third], [True, True], [[0.2, 0.3], [0.1, third]]), LearnerConfig())
    assert result.verdict is Verdict.ZERO_VARIANCE
    assert not any(tokens.any() for member in result.per_token for tokens in member)
