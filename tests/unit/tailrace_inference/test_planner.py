"""The step's plan, for any mix of rows."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace_inference.engine.planner import plan_step, share_budget

PENDING = st.lists(st.integers(1, 300), min_size=1, max_size=60)


@given(PENDING, st.integers(0, 200))
@settings(max_examples=100, deadline=None)
def test_the_budget_is_kept_used_and_given_to_decoding_first(pending: list[int], extra: int) -> None:
    wanted = np.array(pending)
    max_tokens = len(pending) + extra
    take = share_budget(wanted, max_tokens)
    assert take.sum() == min(max_tokens, wanted.sum())
    assert (take[wanted == 1] == 1).all()
    assert (take <= wanted).all()
    prompts = take[wanted > 1] / wanted[wanted > 1]
    assert (np.diff(prompts) <= 0).all(), "earlier prompts are served first"


@given(st.lists(st.tuples(st.integers(1, 300), st.booleans()), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_rows_that_are_computed_again_come_first_and_the_shortest_before_the_others(
    rows: list[tuple[int, bool]],
) -> None:
    pending, again = (np.array(column) for column in zip(*rows, strict=True))
    take = share_budget(pending, 1000, again, 50)
    assert (take[pending == 1] == 1).all()
    prompts = pending > 1
    most = 50 if again.any() else 1000 - np.count_nonzero(pending == 1)
    if again.any() and prompts.all():
        most = pending[again].min()  # no row would get a token earlier
    assert take[prompts].sum() == min(most, pending[prompts].sum())
    lacking = (again & prompts & (take < pending)).any()
    assert not (lacking and take[prompts & ~again].any())
    served = np.flatnonzero(again & prompts & (take > 0))
    left_out = np.flatnonzero(again & prompts & (take == 0))
    assert not len(left_out) or pending[served].max(initial=0) <= pending[left_out].min()


ROWS = st.lists(st.tuples(st.integers(1, 200), st.integers(0, 400)), min_size=1, max_size=80)


@given(ROWS, st.sampled_from([4, 16]))
@settings(max_examples=150, deadline=None)
def test_every_row_is_in_one_group_that_is_wide_enough(
    shapes: list[tuple[int, int]], block_tokens: int
) -> None:
    take, start = (np.array(column) for column in zip(*shapes, strict=True))
    plan = plan_step(np.arange(len(take)), take, start, block_tokens, 20)
    assert sorted(plan.rows.tolist()) == list(range(len(take)))
    assert (plan.take == take[plan.rows]).all()
    assert (plan.start == start[plan.rows]).all()
    covered = [row for group in plan.groups for row in range(group.first_row, group.last_row)]
    assert covered == list(range(len(take)))
    for group in plan.groups:
        rows = slice(group.first_row, group.last_row)
        end = plan.start[rows] + plan.take[rows]
        assert plan.take[rows].max() == group.num_queries
        assert plan.take[rows].min() * 2 > group.num_queries
        assert group.num_blocks * (group.last_row - group.first_row) <= 20 or len(end) == 1
        assert (end.max() + block_tokens - 1) // block_tokens == group.num_blocks
    for index, row in enumerate(plan.rows.tolist()):
        tokens = slice(plan.first[index], plan.first[index] + plan.take[index])
        assert (plan.token_rows[tokens] == row).all()
        assert plan.positions[tokens].tolist() == list(range(start[row], start[row] + take[row]))
    assert len(plan.positions) == take.sum()


def test_rows_of_very_different_context_are_not_padded_to_the_longest() -> None:
    take = np.ones(65, np.int64)
    start = np.array([63] * 64 + [8191])
    plan = plan_step(np.arange(65), take, start, 16, 256)
    assert sorted(group.num_blocks for group in plan.groups)[0] == 4
    padded = sum((group.last_row - group.first_row) * group.num_blocks for group in plan.groups)
    assert padded == 64 * 4 + 512
