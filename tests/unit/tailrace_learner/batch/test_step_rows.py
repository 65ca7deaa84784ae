"""Granularity: a turn is worth the same as a row of its own and as a part of its episode's row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tailrace_protos.base import (
    as_float32,
    as_int32,
    as_uint8,
    pack_float32,
    pack_int32,
    pack_int64,
    pack_uint8,
)
from tailrace_protos.generation import TokenSpan
from tailrace_protos.trajectory import TokenRow, TrajectoryGroup
from tests.unit.tailrace_learner.factory import (
    config,
    episode_of_rows,
    group,
    prepared_group,
    random_group,
    token_row,
)


def by_turns(row: TokenRow) -> tuple[TokenRow, ...]:
    """The rows that `granularity: step` would have made of an episode's row, with all history."""
    ends = as_int32(row.turn_ends).tolist()
    rows = []
    for turn, (start, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        mask = as_uint8(row.loss_mask)[:end].copy()
        mask[:start] = 0
        rows.append(
            TokenRow(
                token_ids=pack_int32(as_int32(row.token_ids)[:end]),
                loss_mask=pack_uint8(mask),
                inference_logprobs=pack_float32(as_float32(row.inference_logprobs)[:end] * mask),
                spans=(TokenSpan(1, "", int(mask.sum())),),
                turn_ends=pack_int32([end]),
                turn_rewards=pack_float32(as_float32(row.turn_rewards)[turn : turn + 1]),
                turn_hashes=pack_int64([turn % 2]),
                reward=row.reward,
                row_id=str(turn),
                first_turn=turn,
            )
        )
    return tuple(rows)


def both() -> tuple[TrajectoryGroup, TrajectoryGroup]:
    """A group of episodes as one row each, and as a row for every turn."""
    whole = random_group(4, num_members=4, num_turns=4)
    members = [
        replace(m, rows=(replace(m.rows[0], turn_hashes=pack_int64([0, 1, 0, 1])),))
        for m in whole.members
    ]
    stepwise = [replace(m, rows=by_turns(m.rows[0])) for m in members]
    return group(members), group(stepwise)


@pytest.mark.parametrize(
    "settings",
    [
        {"adv_estimator": "gigpo", "step_gamma": 0.9},
        {"adv_estimator": "turn_reinforce", "gamma": 0.9},
        {"adv_estimator": "reinforce", "gamma": 0.9},
        {"adv_estimator": "grpo"},
        {"adv_estimator": "starpo"},
    ],
    ids=lambda s: s["adv_estimator"],
)
def test_a_turn_is_worth_the_same_as_a_row_and_within_one(settings: dict[str, Any]) -> None:
    given = config(**settings)
    whole, stepwise = (prepared_group(each, given) for each in both())
    assert len(whole.rows) == 4
    assert len(stepwise.rows) == 16
    for index, row in enumerate(whole.rows):
        parts = stepwise.rows[4 * index : 4 * index + 4]
        np.testing.assert_array_equal(np.concatenate([p.targets for p in parts]), row.targets)
        found = np.concatenate([p.advantages for p in parts])
        np.testing.assert_allclose(found, row.advantages, rtol=1e-5)


def test_step_reinforce_compares_rows_so_granularity_decides_what_is_compared() -> None:
    given = config(adv_estimator="step_reinforce", step_gamma=0.9)
    stepwise = prepared_group(both()[1], given)
    as_turns = prepared_group(both()[0], config(adv_estimator="turn_reinforce", gamma=0.9))
    found = np.concatenate([row.advantages for row in stepwise.rows])
    wanted = np.concatenate([row.advantages for row in as_turns.rows])
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    episodes = prepared_group(both()[0], given)
    assert all(len(set(row.advantages.tolist())) == 1 for row in episodes.rows)


def test_what_a_sub_agent_earned_is_not_credited_to_the_line_beside_it() -> None:
    line = [replace(token_row(str(k), 1.0, [0, 1]), first_turn=k) for k in range(2)]
    beside = token_row("sub", 7.0, [0, 1])
    member = episode_of_rows(0, 9.0, [*line, beside])  # 1 + 1 + 7
    rows = prepared_group(group([member]), config(adv_estimator="reinforce")).rows
    assert [row.advantages.tolist() for row in rows] == [[2.0], [1.0], [7.0]]
