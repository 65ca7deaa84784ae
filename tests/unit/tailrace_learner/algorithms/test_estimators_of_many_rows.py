"""Estimators against numpy in float64, on members of several rows that are credited differently.

Every row is a line of turns by itself. Masks have holes within turns, which are skipped; nothing is
credited with what an invalid member has, which is not a number.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms import ESTIMATORS, Returns, Turns, Verdict

Array = NDArray[np.float64]


@dataclass
class Drawn:
    """One row of a valid member."""

    member: int
    credit: float  # the row's return
    rewards: Array  # [K] of its turns, summing to the credit
    observations: NDArray[np.int64]  # [K]
    turn_of_token: NDArray[np.int64]  # [N] of policy tokens


@dataclass
class Group:
    returns: Returns
    worth: dict[int, float]  # return of every valid member
    rows: list[Drawn]  # of valid members, in order

    @property
    def pool(self) -> Array:
        return np.array(list(self.worth.values()))


def drawn_turns(rng: np.random.Generator) -> tuple[NDArray[np.uint8], Turns]:
    """1 to 4 turns of inserted and sampled tokens, at least one sampled, with holes in between."""
    mask: list[int] = []
    ends = []
    for _ in range(int(rng.integers(1, 5))):
        mask += (
            [0] * int(rng.integers(0, 3)) + [1] + (rng.random(int(rng.integers(0, 5))) < 0.6).tolist()
        )
        ends.append(len(mask))
    rewards, observations = rng.normal(size=len(ends)), rng.integers(0, 3, len(ends))
    return np.array(mask, np.uint8), Turns(np.array(ends, np.int32), rewards, observations)


def drawn_group(seed: int) -> Group:
    """1 to 6 members of 1 to 4 rows; one seed in five without variance."""
    rng = np.random.default_rng(seed)
    is_valid = rng.random(1 if seed == 0 else int(rng.integers(2, 7))) < 0.75
    is_valid[0] = True
    rewards = np.full(len(is_valid), 0.3) if seed % 5 == 4 else rng.normal(0.5, 1.0, len(is_valid))
    rewards[~is_valid] = np.nan
    parts = [[drawn_turns(rng) for _ in range(int(rng.integers(1, 5)))] for _ in is_valid]
    credits = [
        np.where(valid, rng.normal(size=len(rows)), np.nan)
        for valid, rows in zip(is_valid, parts, strict=True)
    ]
    found = []
    for member in np.flatnonzero(is_valid).tolist():
        for credit, (mask, turns) in zip(credits[member], parts[member], strict=True):
            topped_up = turns.rewards.copy()
            topped_up[-1] += credit - topped_up.sum()
            owners = np.searchsorted(turns.ends, np.flatnonzero(mask), side="right")
            found.append(Drawn(member, float(credit), topped_up, turns.observations, owners))
    returns = Returns(
        rewards=rewards,
        is_valid=is_valid,
        row_rewards=tuple(credits),
        loss_masks=tuple(tuple(mask for mask, _ in rows) for rows in parts),
        turns=tuple(tuple(turns for _, turns in rows) for rows in parts),
        greedy=seed % len(is_valid),
    )
    return Group(returns, {i: float(rewards[i]) for i in np.flatnonzero(is_valid).tolist()}, found)


def to_go(rewards: Array, gamma: float) -> Array:
    steps = np.arange(len(rewards))
    ahead = steps[None, :] - steps[:, None]
    return np.where(ahead >= 0, gamma ** np.maximum(ahead, 0).astype(float), 0.0) @ rewards


def deviations(values: Array) -> Array:
    """From the mean, in standard deviations; 0 of one value and of equals."""
    if len(values) < 2 or np.ptp(values) < 1e-9:
        return np.zeros(len(values))
    return (values - values.mean()) / (values.std(ddof=1) + 1e-6)


Reference = Callable[[Group, LearnerConfig], list[Array]]  # a value for every policy token of each row


def of_rows(of: Callable[[Group, Drawn], float]) -> Reference:
    return lambda group, _: [np.full(len(row.turn_of_token), of(group, row)) for row in group.rows]


def deviation(group: Group, row: Drawn) -> float:
    return float((row.credit - group.pool.mean()) / (group.pool.std(ddof=1) + 1e-6))


def above_others(group: Group, row: Drawn) -> float:
    return row.credit - np.mean([worth for i, worth in group.worth.items() if i != row.member])


def above_weighted(group: Group, row: Drawn) -> float:
    """Every member weighs as much as it has policy tokens, of all its rows."""
    tokens = {i: sum(len(r.turn_of_token) for r in group.rows if r.member == i) for i in group.worth}
    total = sum(tokens[i] * worth for i, worth in group.worth.items())
    return row.credit - total / sum(tokens.values())


def above_greedy(group: Group, row: Drawn) -> float:
    greedy = group.returns.greedy
    return 0.0 if row.member == greedy else row.credit - group.worth[greedy]


def reinforce(group: Group, config: LearnerConfig, baseline: float = 0.0) -> list[Array]:
    found = []
    for row in group.rows:
        of_tokens = np.zeros(len(row.turn_of_token))
        for turn, reward in enumerate(row.rewards):
            of_tokens[np.flatnonzero(row.turn_of_token == turn)[-1]] = reward
        of_tokens[-1] -= baseline
        found.append(to_go(of_tokens, config.gamma))
    return found


def turn_reinforce(group: Group, config: LearnerConfig) -> list[Array]:
    worth = [to_go(row.rewards, config.gamma) for row in group.rows]
    values = np.split(deviations(np.concatenate(worth)), np.cumsum([len(w) for w in worth])[:-1])
    return [value[row.turn_of_token] for row, value in zip(group.rows, values, strict=True)]


def step_reinforce(group: Group, config: LearnerConfig) -> list[Array]:
    values = deviations(np.array([to_go(row.rewards, config.step_gamma)[0] for row in group.rows]))
    return [np.full(len(r.turn_of_token), v) for r, v in zip(group.rows, values, strict=True)]


def gigpo(group: Group, config: LearnerConfig) -> list[Array]:
    worth = np.concatenate([to_go(row.rewards, config.step_gamma) for row in group.rows])
    seen = np.concatenate([row.observations for row in group.rows])
    steps = np.zeros(len(worth))
    for anchor in np.unique(seen):
        steps[seen == anchor] = deviations(worth[seen == anchor])
    episodes = dict(zip(group.worth, deviations(group.pool), strict=True))
    of_rows = np.split(steps, np.cumsum([len(row.rewards) for row in group.rows])[:-1])
    return [(episodes[r.member] + s)[r.turn_of_token] for r, s in zip(group.rows, of_rows, strict=True)]


STARPO: dict[str, Reference] = {
    "mean_std": of_rows(deviation),
    "mean": of_rows(lambda group, row: row.credit - group.pool.mean()),
    "none": of_rows(lambda group, row: row.credit),
}
CASES: list[tuple[dict[str, Any], Reference]] = [
    ({"adv_estimator": "grpo"}, of_rows(deviation)),
    ({"adv_estimator": "rloo"}, of_rows(above_others)),
    ({"adv_estimator": "opo"}, of_rows(above_weighted)),
    ({"adv_estimator": "remax"}, of_rows(above_greedy)),
    *(({"adv_estimator": "starpo", "reward_norm": norm}, each) for norm, each in STARPO.items()),
    ({"adv_estimator": "reinforce", "gamma": 0.9}, reinforce),
    ({"adv_estimator": "reinforce_plus_plus", "gamma": 0.8}, reinforce),
    (
        {"adv_estimator": "reinforce_plus_plus_baseline", "gamma": 0.9},
        lambda group, config: reinforce(group, config, group.pool.mean()),
    ),
    ({"adv_estimator": "turn_reinforce", "gamma": 0.7}, turn_reinforce),
    ({"adv_estimator": "step_reinforce", "step_gamma": 0.8}, step_reinforce),
    ({"adv_estimator": "gigpo", "step_gamma": 0.9}, gigpo),
]
OF_TURNS = frozenset({"turn_reinforce", "step_reinforce", "gigpo"})  # equal returns do not silence them


def teaches(group: Group, config: LearnerConfig) -> bool:
    name = config.adv_estimator
    is_compared = bool(ESTIMATORS[name].compares_group) and config.reward_norm != "none"
    if name == "remax" and group.returns.greedy not in group.worth:
        return False
    if is_compared and len(group.pool) < 2:
        return False
    return not is_compared or name in OF_TURNS or np.ptp(group.pool) > 1e-9


@pytest.mark.parametrize(
    ("settings", "reference"),
    CASES,
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else "",
)
def test_an_estimator_equals_its_formula_on_rows_credited_differently(
    settings: dict[str, Any], reference: Reference
) -> None:
    config = LearnerConfig(**settings)
    num_trained = 0
    for seed in range(25):
        group = drawn_group(seed)
        if config.adv_estimator != "remax":
            group.returns = replace(group.returns, greedy=-1)
        result = ESTIMATORS[config.adv_estimator](group.returns, config)
        is_trained = teaches(group, config)
        assert (result.verdict is Verdict.TRAIN) == is_trained
        wanted = iter(reference(group, config) if is_trained else [])
        for is_valid, rows, masks in zip(
            group.returns.is_valid, result.per_token, group.returns.loss_masks, strict=True
        ):
            for found, mask in zip(rows, masks, strict=True):
                expected = next(wanted) if is_valid and is_trained else 0.0
                np.testing.assert_allclose(found[mask != 0], expected, rtol=1e-6, atol=1e-9)
                assert not found[mask == 0].any()
        num_trained += is_trained
    assert num_trained >= 8
