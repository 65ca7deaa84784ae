"""Episodes of conversations: a token's credit does not depend on how calls were cut into rows, and no
conversation has a part in what another one earned."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace as replaced

from tailrace.ledger import Ledger
from tailrace_learner.config import CriticArgs, LearnerConfig
from tailrace_learner.core.algorithms import ESTIMATORS, Advantages, Returns, Turns
from tailrace_learner.core.algorithms.advantages.shaping import shaped
from tailrace_learner.core.batch.group_returns import NO_LIMITS, group_returns
from tailrace_learner.core.step.step_advantages import finish_advantages
from tailrace_protos.base import as_int32, as_uint8
from tailrace_protos.session import ExportStyle
from tailrace_protos.trajectory import Trajectory, TrajectoryGroup
from tests.unit.tailrace.ledger.calls import ledger_of, node
from tests.unit.tailrace_learner.factory import config, group, prepared_group, trajectory

CONCAT, INDIVIDUAL, STEP = ExportStyle.CONCAT, ExportStyle.INDIVIDUAL, ExportStyle.STEP

call = partial(node, policy_version=1)  # fresh, as `prepared_group` sees it

Credit = dict[tuple[int, int], float]  # (member, token id) -> advantage


def episode(
    member: int, ledger: Ledger, style: ExportStyle, discount: float = 1.0, added: float = 0.0
) -> Trajectory:
    """`added`: what a reward service gave to the whole episode."""
    reward = added + math.fsum(each.reward or 0.0 for each in ledger.nodes)
    rows = [
        replaced(row, reward=row.reward + added * row.has_reward)
        for row in ledger.rows(style, discount)
    ]
    return replaced(trajectory(member, reward), rows=tuple(rows))


def settings_of(name: Any, **settings: Any) -> LearnerConfig:
    if name == "gae":
        settings["critic"] = CriticArgs()
    return config(adv_estimator=name, **settings)


def estimated(given: TrajectoryGroup, settings: LearnerConfig) -> Advantages:
    """Values of a critic are some function of the token."""
    returns = shaped(group_returns(given, NO_LIMITS, Counter()), settings)
    values = tuple(
        tuple(np.sin(as_int32(row.token_ids).astype(float)) for row in member.rows)
        for member in given.members
    )
    return ESTIMATORS[settings.adv_estimator](replace(returns, values=values), settings)


def credit(given: TrajectoryGroup, settings: LearnerConfig) -> Credit:
    """As the estimator says."""
    found = estimated(given, settings).per_token
    return {
        (member.member, int(token)): float(value)
        for member, rows in zip(given.members, found, strict=True)
        for row, values in zip(member.rows, rows, strict=True)
        for token, value, mask in zip(
            as_int32(row.token_ids), values, as_uint8(row.loss_mask), strict=True
        )
        if mask
    }


def trained(given: TrajectoryGroup, settings: LearnerConfig) -> Credit:
    """As a step trains it, whitened where it does that."""
    prepared = prepared_group(given, settings)
    if settings.waits_for_step:
        finish_advantages([prepared], settings)
    return {
        (int(row.row_id.split("/")[0].split(".")[1]), int(token)): float(value)
        for row in prepared.rows
        for token, value in zip(row.target_ids, row.advantages, strict=True)
    }


def random_ledger(rng: np.random.Generator) -> Ledger:
    """Up to 8 calls: conversations that fork, are rendered whole, have masked calls and few rewards."""
    nodes, tokens = [], iter(range(1, 99))
    for index in range(int(rng.integers(1, 9))):
        parent = f"c{rng.integers(0, index)}" if index and rng.random() < 0.75 else ""
        nodes.append(
            call(
                f"c{index}",
                parent,
                [next(tokens)],
                [next(tokens) for _ in range(int(rng.integers(1, 4)))],
                round(float(rng.normal()), 2) if rng.random() < 0.5 else None,
                is_rendered_whole=bool(parent and rng.random() < 0.15),
                is_masked=bool(rng.random() < 0.1),
            )
        )
    return ledger_of(*nodes)


TURN_LEVEL: list[tuple[str, dict[str, Any]]] = [
    ("reinforce", {"gamma": 0.9}),
    ("reinforce", {"reward_clip": 0.7}),
    ("reinforce", {"overlong_max_tokens": 8, "overlong_buffer_tokens": 6}),
    ("reinforce_plus_plus", {"gamma": 0.95}),
    ("reinforce_plus_plus_baseline", {"gamma": 0.9}),
    ("gae", {"gamma": 0.9, "lambd": 1.0}),
    ("gae", {"gamma": 0.9, "lambd": 1.0, "gae_unit": "turn"}),
    ("turn_reinforce", {"gamma": 0.5}),
    ("turn_reinforce", {"norm_std": False, "reward_clip": 0.7}),
    ("gigpo", {}),
]


@pytest.mark.parametrize(("name", "settings"), TURN_LEVEL)
def test_a_token_is_credited_the_same_in_rows_of_calls_and_of_conversations(
    name: str, settings: dict[str, Any]
) -> None:
    given, num_credited = settings_of(name, **settings), 0
    for seed in range(24):
        rng = np.random.default_rng(seed)
        ledgers = [random_ledger(rng) for _ in range(3)]
        discount = float(rng.choice([0.0, 0.5, 0.9, 1.0]))
        added = rng.choice([0.0, 0.25], 3).tolist()
        one, other = (
            group([episode(i, ledgers[i], style, discount, added[i]) for i in range(3)])
            for style in (CONCAT, INDIVIDUAL)
        )
        for read in (credit,) if name == "gae" else (credit, trained):
            found, wanted = read(one, given), read(other, given)
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
            num_credited += any(found.values())
    assert num_credited > 16


def test_a_turn_is_worth_what_followed_it_in_the_tree_and_no_sibling_of_it() -> None:
    # a (1) ── b (0) ── c (4)      R_c 4, R_b 4, R_d -10, R_a 1 + (4 - 10) / 2 = -2
    #       └─ d (-10)
    ledger = ledger_of(
        call("a", "", [1, 2], [3], 1.0),
        call("b", "a", [4], [5]),
        call("c", "b", [7], [8], 4.0),
        call("d", "a", [9], [10], -10.0),
    )
    wanted = {(0, 3): -2.0, (0, 5): 4.0, (0, 8): 4.0, (0, 10): -10.0}
    for style in (CONCAT, INDIVIDUAL):
        assert credit(group([episode(0, ledger, style)]), settings_of("reinforce")) == wanted


@pytest.mark.parametrize(("discount", "wanted"), [(1.0, [5, 4, 4]), (0.5, [2, 2, 4]), (0.0, [1, 0, 4])])
def test_a_discount_reaches_the_turns_before_and_not_the_turn_itself(
    discount: float, wanted: list[float]
) -> None:
    # a (1) ── b (0) ── c (4): R_b = discount * 4, R_a = 1 + discount * R_b
    ledger = ledger_of(
        call("a", "", [1, 2], [3], 1.0), call("b", "a", [4], [5]), call("c", "b", [7], [8], 4.0)
    )
    for style in (CONCAT, INDIVIDUAL):
        found = credit(group([episode(0, ledger, style, discount)]), settings_of("reinforce"))
        assert list(found.values()) == wanted


def test_gae_goes_on_over_the_turns_of_a_conversation() -> None:
    """One row of three calls is one sequence: what the critic says of the next turn counts."""
    ledger = ledger_of(
        call("a", "", [1, 2], [3], 1.0), call("b", "a", [4], [5]), call("c", "b", [7], [8], 4.0)
    )
    given = settings_of("gae", gamma=1.0, lambd=0.8)
    a, b, c = (math.sin(token) for token in (3, 5, 8))
    last = 4.0 - c
    middle = 0.0 + c - b + 0.8 * last
    first = 1.0 + b - a + 0.8 * middle
    found = credit(group([episode(0, ledger, CONCAT)]), given)
    assert list(found.values()) == pytest.approx([first, middle, last])


# A main agent a, b and a sub-agent s that it asked in between.


def team(main: float, sub: float | None = None, *, alone: bool = False) -> Ledger:
    calls = [call("a", "", [1], [2]), call("b", "a", [5], [6, 7], main)]
    if not alone:
        calls.insert(1, call("s", "", [3], [4, 8, 9], sub))
    return ledger_of(*calls)


def teams(ledgers: Sequence[Ledger], style: ExportStyle, *, is_greedy: bool = False) -> TrajectoryGroup:
    members = [episode(index, ledger, style) for index, ledger in enumerate(ledgers)]
    return group([replaced(members[0], is_greedy=is_greedy), *members[1:]])


SUB = (4, 8, 9)  # tokens of the sub-agent


@pytest.mark.parametrize("style", [CONCAT, INDIVIDUAL, STEP])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_sub_agent_without_a_reward_has_no_part_in_anything(name: str, style: ExportStyle) -> None:
    given = settings_of(name)
    is_greedy = name == "remax"
    with_it = teams([team(r) for r in (1.0, 0.0, 1.0)], style, is_greedy=is_greedy)
    without = teams([team(r, alone=True) for r in (1.0, 0.0, 1.0)], style, is_greedy=is_greedy)
    found, wanted = credit(with_it, given), credit(without, given)
    subs = {key: found.pop(key) for key in list(found) if key[1] in SUB}
    assert len(subs) == 9
    assert not any(subs.values())
    assert found == pytest.approx(wanted)
    assert any(found.values())
    if name != "gae":
        learnt = trained(with_it, given)
        assert learnt == pytest.approx(trained(without, given))
        assert any(learnt.values())


def test_rows_without_a_reward_are_counted_and_trained_only_for_their_divergence() -> None:
    given = teams([team(1.0), team(0.0)], CONCAT)
    prepared = prepared_group(given, config())
    assert prepared.counts["num_unrewarded_rows"] == 2
    assert {row.row_id for row in prepared.rows} == {"g0.0/b", "g0.1/b"}
    held = config(whiten_advantages=True, adv_estimator="reinforce", init_kl_coef=0.1)
    prepared = prepared_group(given, held)
    finish_advantages([prepared], held)
    rows = {row.row_id: row.advantages for row in prepared.rows}
    assert set(rows) == {"g0.0/b", "g0.0/s", "g0.1/b", "g0.1/s"}
    assert not rows["g0.0/s"].any()
    alone = [team(1.0, alone=True), team(0.0, alone=True)]
    plain = prepared_group(teams(alone, CONCAT), held)
    finish_advantages([plain], held)
    for row in plain.rows:
        np.testing.assert_allclose(rows[row.row_id], row.advantages, rtol=1e-6)


RANGE = 0.5**0.5  # half the range of two values, over their sample deviation
# Of two teams whose main agents got 1 and 0, their sub-agents 0.2 and 0.6.
LIKES: list[tuple[str, dict[str, Any], float, float]] = [
    ("grpo", {"norm_std": False}, 0.5, 0.2),
    ("grpo", {}, RANGE, RANGE),
    ("rloo", {}, 1.0, 0.4),
    ("opo", {}, 0.5, 0.2),
    ("starpo", {"reward_norm": "mean"}, 0.5, 0.2),
    ("starpo", {"reward_norm": "mean", "reward_grouping": "batch"}, 0.5, 0.2),
    ("turn_reinforce", {"norm_std": False}, 0.5, 0.2),
    ("step_reinforce", {"norm_std": False, "step_gamma": 1.0}, 0.5, 0.2),
    ("gigpo", {"norm_std": False, "step_advantage_weight": 0.0}, 0.5, 0.2),
]


@pytest.mark.parametrize("style", [CONCAT, INDIVIDUAL, STEP])
@pytest.mark.parametrize(("name", "settings", "main", "sub"), LIKES)
def test_a_sub_agent_with_a_reward_is_compared_with_those_of_its_place(
    name: str, settings: dict[str, Any], main: float, sub: float, style: ExportStyle
) -> None:
    given = settings_of(name, **settings)
    found = trained(teams([team(1.0, 0.2), team(0.0, 0.6)], style), given)
    assert [found[0, 7], found[1, 7]] == pytest.approx([main, -main], abs=1e-5)
    assert [found[0, 8], found[1, 8]] == pytest.approx([-sub, sub], abs=1e-5)


def test_the_baseline_of_plus_plus_is_that_of_the_place() -> None:
    found = credit(
        teams([team(1.0, 0.1), team(0.0, 0.9)], CONCAT), settings_of("reinforce_plus_plus_baseline")
    )
    assert [found[0, 7], found[0, 8], found[1, 8]] == pytest.approx([0.5, -0.4, 0.4])


def test_remax_compares_a_sub_agent_with_the_greedy_ones_and_none_that_it_lacks() -> None:
    played = [team(1.0, 0.1), team(0.0, 0.9)]
    found = credit(teams(played, CONCAT, is_greedy=True), settings_of("remax"))
    assert [found[1, 7], found[1, 8]] == pytest.approx([-1.0, 0.8])
    found = credit(teams([team(1.0), team(0.0, 0.9)], CONCAT, is_greedy=True), settings_of("remax"))
    assert [found[1, 7], found[1, 8]] == pytest.approx([-1.0, 0.0])


def test_a_place_that_one_member_alone_has_is_compared_with_all_of_the_group() -> None:
    # Main agents got 1 and 0; only the first asked another agent, which got 0.8: mean 0.6.
    given = teams([team(1.0, 0.8), team(0.0)], CONCAT)
    for name in ("grpo", "gigpo"):
        found = credit(given, settings_of(name, norm_std=False))
        assert [found[0, 7], found[1, 7], found[0, 8]] == pytest.approx([0.5, -0.5, 0.2])


def test_equal_returns_of_agents_whose_episodes_differ_teach_nothing_about_them() -> None:
    found = credit(teams([team(1.0, 0.5), team(0.0, 0.5)], CONCAT), settings_of("grpo"))
    assert found[0, 7] > 0 > found[1, 7]
    assert found[0, 8] == found[1, 8] == 0.0


WHITENED: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("opo", {}),
    ("remax", {}),
    ("reinforce_plus_plus_baseline", {}),
    ("reinforce_plus_plus_baseline", {"init_kl_coef": 0.1, "kl_in": "loss"}),
    ("turn_reinforce", {}),
    ("step_reinforce", {}),
    ("gigpo", {"step_advantage_weight": 0.0}),
]


@pytest.mark.parametrize("style", [CONCAT, INDIVIDUAL])
@pytest.mark.parametrize(("name", "settings"), WHITENED)
def test_agents_whose_returns_are_equal_are_left_out_of_whitening(
    name: str, settings: dict[str, Any], style: ExportStyle
) -> None:
    given, is_greedy = settings_of(name, whiten_advantages=True, **settings), name == "remax"
    rewards = (0.25, 1.0, 0.0, 0.5)
    learnt = trained(teams([team(r, 0.5) for r in rewards], style, is_greedy=is_greedy), given)
    alone = teams([team(r, alone=True) for r in rewards], style, is_greedy=is_greedy)
    subs = {key: learnt.pop(key) for key in list(learnt) if key[1] in SUB}
    assert subs
    assert not any(subs.values())
    assert learnt == pytest.approx(trained(alone, given))


def test_a_reward_of_zero_is_a_reward() -> None:
    found = credit(teams([team(1.0, 0.0), team(0.0, 1.0)], CONCAT), settings_of("rloo"))
    assert (found[0, 8], found[1, 8]) == (-1.0, 1.0)


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name != "gae"])
def test_a_conversation_in_which_nothing_was_sampled_changes_nothing(name: Any) -> None:
    """Its rows have returns, and no token that could have an advantage."""
    masks = (np.ones(3, np.uint8), np.zeros(3, np.uint8))
    turns = tuple(Turns(np.array([3], np.int32), np.zeros(1), np.zeros(0, np.int64)) for _ in masks)
    given = Returns(
        rewards=np.array([1.0, 0.0]),
        is_valid=np.ones(2, np.bool_),
        row_rewards=(np.array([1.0, 0.5]), np.array([0.0, 0.25])),
        loss_masks=(masks, masks),
        turns=(turns, turns),
        greedy=1 if name == "remax" else -1,
        conversations=(np.array([0, 1]), np.array([0, 1])),
    )
    settings = settings_of(name)
    found = ESTIMATORS[name](given, settings).per_token
    alone = replace(
        given,
        row_rewards=tuple(each[:1] for each in given.row_rewards),
        loss_masks=tuple(each[:1] for each in given.loss_masks),
        turns=tuple(each[:1] for each in given.turns),
        conversations=tuple(each[:1] for each in given.conversations),
    )
    wanted = ESTIMATORS[name](alone, settings).per_token
    for rows, (row,) in zip(found, wanted, strict=True):
        np.testing.assert_allclose(rows[0], row)
        assert not rows[1].any()
