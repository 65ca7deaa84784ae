"""Statistics over tags and whole steps against plain Python in float64, from groups to advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tailrace_learner.core.algorithms.metrics import StepData, data_metrics
from tailrace_learner.core.batch.rows import PreparedGroup
from tailrace_learner.core.step.step_advantages import finish_advantages
from tailrace_protos.episode import EnvTask, Outcome
from tailrace_protos.trajectory import Trajectory, TrajectoryGroup
from tests.unit.tailrace_learner.factory import (
    config,
    group,
    prepared_group,
    random_group,
    token_row,
    trajectory,
)

TAGS = ("lake", "lake", "crates", "crates", "equal", "alone")


def retagged(member: Trajectory, tag: str) -> Trajectory:
    """The member with a task of this tag; returns of `equal` differ by rounding only."""
    given = replace(member, task=EnvTask(tag, 1))
    if tag != "equal":
        return given
    reward = 0.3 if member.member % 2 else 0.1 + 0.2
    return replace(given, reward=reward, rows=tuple(replace(row, reward=reward) for row in given.rows))


def step_groups(seed: int, *, step_rows: bool) -> list[TrajectoryGroup]:
    """Ragged groups; some members failed, and of tag `alone` only one did not."""
    rng = np.random.default_rng(seed)
    groups = []
    for index, tag in enumerate(TAGS):
        made = random_group(
            10 * seed + index,
            num_members=int(rng.integers(2, 6)),
            num_turns=int(rng.integers(1, 4)),
            step_rows=step_rows,
        )
        failed = [n > 0 and (tag == "alone" or rng.random() < 0.3) for n in range(len(made.members))]
        members = [
            replace(retagged(member, tag), outcome=Outcome.INFRA_FAILURE if is_failed else Outcome.OK)
            for member, is_failed in zip(made.members, failed, strict=True)
        ]
        groups.append(group(members, index))
    return groups


def is_valid(member: Trajectory) -> bool:
    return member.outcome is Outcome.OK


def scope_of(given: TrajectoryGroup, grouping: str) -> str:
    return {"traj_group_id": given.group_id, "tags": given.members[0].task.env_name, "batch": ""}[
        grouping
    ]


def pools(groups: list[TrajectoryGroup], grouping: str) -> dict[str, list[float]]:
    """Returns of the valid episodes that are compared with each other."""
    found: dict[str, list[float]] = {}
    for each in groups:
        pool = found.setdefault(scope_of(each, grouping), [])
        pool += [member.reward for member in each.members if is_valid(member)]
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    return float((sum((v - mean(values)) ** 2 for v in values) / (len(values) - 1)) ** 0.5)


def compared(value: float, pool: list[float], norm: str) -> float:
    if norm == "none":
        return value
    if len(pool) < 2 or max(pool) - min(pool) < 1e-12:
        return 0.0
    return (value - mean(pool)) / (std(pool) + 1e-6 if norm == "mean_std" else 1.0)


def expected(groups: list[TrajectoryGroup], grouping: str, norm: str) -> dict[str, float]:
    """The advantage of every row of a valid episode, by its id."""
    found = pools(groups, grouping)
    return {
        f"{member.episode_id}/{row.row_id}".rstrip("/"): compared(
            row.reward, found[scope_of(each, grouping)], norm
        )
        for each in groups
        for member in each.members
        if is_valid(member)
        for row in member.rows
    }


def finished(groups: list[TrajectoryGroup], **settings: Any) -> list[PreparedGroup]:
    given = config(**settings)
    prepared = [prepared_group(each, given) for each in groups]
    finish_advantages(prepared, given)
    return prepared


@pytest.mark.parametrize("step_rows", [False, True])
@pytest.mark.parametrize("norm", ["mean_std", "mean", "none"])
@pytest.mark.parametrize("grouping", ["traj_group_id", "tags", "batch"])
def test_starpo_equals_its_formula_in_every_scope(grouping: str, norm: str, step_rows: bool) -> None:
    settings = {"adv_estimator": "starpo", "reward_grouping": grouping, "reward_norm": norm}
    for seed in range(4):
        groups = step_groups(seed, step_rows=step_rows)
        wanted = expected(groups, grouping, norm)
        rows = [row for each in finished(groups, **settings) for row in each.rows]
        for row in rows:
            np.testing.assert_allclose(row.advantages, wanted[row.row_id], rtol=1e-6, atol=1e-9)
        assert {row.row_id for row in rows} >= {name for name, value in wanted.items() if value}
        in_tag = [row for row in rows if wanted[row.row_id] == 0.0]
        assert bool(in_tag) == (grouping == "tags" and norm != "none")  # `alone` and `equal`
        assert not any(row.advantages.any() for row in in_tag)


@pytest.mark.parametrize("grouping", ["tags", "batch"])
def test_whitening_equals_its_formula_over_all_trained_tokens(grouping: str) -> None:
    settings = {"adv_estimator": "starpo", "reward_grouping": grouping, "advantage_clip": 1.1}
    for seed in range(4):
        groups = step_groups(seed, step_rows=False)
        raw = expected(groups, grouping, "mean_std")
        prepared = finished(groups, whiten_advantages=True, **settings)
        rows = [row for each in prepared for row in each.rows]
        clipped = {name: min(max(value, -1.1), 1.1) for name, value in raw.items()}
        tokens = [clipped[row.row_id] for row in rows for _ in row.targets]
        for row in rows:
            wanted = (clipped[row.row_id] - mean(tokens)) / (std(tokens) + 1e-6)
            np.testing.assert_allclose(row.advantages, wanted, rtol=1e-6, atol=1e-9)
        assert any(abs(value) > 1.1 for value in raw.values())


def test_whitening_one_token_gives_nothing() -> None:
    alone = replace(trajectory(0, 1.0), rows=(token_row("0", 1.0, [0, 0, 1]),))
    (prepared,) = finished([group([alone])], adv_estimator="reinforce", whiten_advantages=True)
    assert [row.advantages.tolist() for row in prepared.rows] == [[0.0]]


@pytest.mark.parametrize(
    ("rewards", "verdict"), [((1.0,), "too_few_valid"), ((1.0, 1.0), "zero_variance")]
)
def test_a_scope_that_compares_nothing_is_counted(rewards: tuple[float, ...], verdict: str) -> None:
    """Groups of one episode, each of a tag: `lake` has two that differ, `alone` what is given."""
    lake = [group([retagged(trajectory(0, reward), "lake")]) for reward in (1.0, 0.0)]
    alone = [group([retagged(trajectory(0, reward), "alone")]) for reward in rewards]
    settings: dict[str, Any] = {"adv_estimator": "starpo", "reward_grouping": "tags"}
    prepared = finished([*lake, *alone], **settings)
    finish_advantages(prepared, config(**settings))  # again, as after a quarantine
    metrics = data_metrics(StepData(1, prepared, []), config(**settings))
    assert metrics["num_groups_train"] == 2
    assert metrics[f"num_groups_{verdict}"] == len(rewards)
    assert not any(row.advantages.any() for each in prepared[2:] for row in each.rows)
