"""Every advantage estimator against plain Python in float64, on random ragged groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tailrace_learner.config import CriticArgs, LearnerConfig
from tailrace_learner.core.algorithms import ESTIMATORS, Returns, Turns, Verdict
from tailrace_learner.core.algorithms.advantages.shaping import shaped
from tailrace_learner.core.algorithms.advantages.turn_sequences import turn_sequences

TOLERANCE = 1e-6


@dataclass
class Member:
    """One episode: its turns in order, cut into rows."""

    reward: float
    valid: bool
    turn_rewards: list[float]
    turn_tokens: list[int]  # policy tokens of each turn
    observations: list[int]
    row_sizes: list[int]  # turns of each row
    greedy: bool = False


def make_member(rng: np.random.Generator, *, step_rows: bool, valid: bool, same: bool) -> Member:
    num_turns = int(rng.integers(1, 6))
    rewards = [0.5] * 3 if same else rng.normal(size=num_turns).round(3).tolist()
    num_turns = len(rewards)
    return Member(
        reward=2.0 if same else float(sum(rewards) + rng.integers(0, 2)),
        valid=valid,
        turn_rewards=rewards,
        turn_tokens=rng.integers(1, 4, num_turns).tolist(),
        observations=rng.integers(0, 3, num_turns).tolist(),
        row_sizes=[1] * num_turns if step_rows else [num_turns],
    )


def make_members(seed: int, *, step_rows: bool) -> list[Member]:
    """A group of 1 to 6; some members invalid, one seed in four without variance."""
    rng = np.random.default_rng(seed)
    same = seed % 4 == 3
    return [
        make_member(rng, step_rows=step_rows, valid=bool(rng.random() < 0.8) or index == 0, same=same)
        for index in range(1 if seed == 0 else int(rng.integers(2, 7)))
    ]


def as_returns(members: list[Member]) -> Returns:
    """Two inserted tokens before every turn; rewards of invalid members would break everything."""
    rewards, masks, turns = [], [], []
    for member in members:
        rewards.append(member.reward if member.valid else float("nan"))
        member_masks, member_turns, first = [], [], 0
        for size in member.row_sizes:
            mask: list[int] = []
            ends = []
            for k in range(first, first + size):
                mask += [0, 0] + [1] * member.turn_tokens[k]
                ends.append(len(mask))
            part = slice(first, first + size)
            member_masks.append(np.array(mask, np.uint8))
            member_turns.append(
                Turns(
                    np.array(ends, np.int32),
                    np.array(member.turn_rewards[part], np.float64),
                    np.array(member.observations[part], np.int64),
                    first if len(member.row_sizes) > 1 else -1,
                )
            )
            first += size
        masks.append(tuple(member_masks))
        turns.append(tuple(member_turns))
    return Returns(
        rewards=np.array(rewards),
        is_valid=np.array([member.valid for member in members]),
        row_rewards=tuple(
            np.full(len(member.row_sizes), reward)
            for member, reward in zip(members, rewards, strict=True)
        ),
        loss_masks=tuple(masks),
        turns=tuple(turns),
        greedy=next((index for index, member in enumerate(members) if member.greedy), -1),
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def std(values: list[float]) -> float:
    centre = mean(values)
    return (sum((v - centre) ** 2 for v in values) / (len(values) - 1)) ** 0.5


def normal(values: list[float], divide: bool = True) -> list[float]:
    if len(values) < 2 or max(values) - min(values) <= 1e-9:
        return [0.0] * len(values)
    return [(v - mean(values)) / ((std(values) + 1e-6) if divide else 1.0) for v in values]


def topped_up(member: Member) -> list[float]:
    """Turn rewards whose sum is the return."""
    rewards = list(member.turn_rewards)
    rewards[-1] += member.reward - sum(rewards)
    return rewards


def to_go(rewards: list[float], gamma: float) -> list[float]:
    return [
        sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))
    ]


PerToken = list[list[float]]  # policy tokens of each valid member


def spread(member: Member, per_turn: list[float]) -> list[float]:
    return [v for v, n in zip(per_turn, member.turn_tokens, strict=True) for _ in range(n)]


def same_everywhere(member: Member, value: float) -> list[float]:
    return [value] * sum(member.turn_tokens)


def over_episodes(per_episode: Callable[[list[Member]], list[float]]) -> Any:
    def reference(pool: list[Member], config: LearnerConfig) -> PerToken:
        return [same_everywhere(m, v) for m, v in zip(pool, per_episode(pool), strict=True)]

    return reference


def reference_rloo(pool: list[Member]) -> list[float]:
    rewards = [m.reward for m in pool]
    if max(rewards) - min(rewards) < 1e-9:
        return [0.0] * len(pool)
    return [m.reward - mean([o.reward for o in pool if o is not m]) for m in pool]


def reference_opo(pool: list[Member]) -> list[float]:
    lengths = [sum(m.turn_tokens) for m in pool]
    baseline = sum(n * m.reward for n, m in zip(lengths, pool, strict=True)) / sum(lengths)
    return [m.reward - baseline for m in pool]


def reference_remax(pool: list[Member]) -> list[float]:
    """0 for the greedy member, and for all where it is not valid."""
    baseline = next((m.reward for m in pool if m.greedy), None)
    return [0.0 if m.greedy or baseline is None else m.reward - baseline for m in pool]


def reference_reinforce(pool: list[Member], config: LearnerConfig) -> PerToken:
    result = []
    for member in pool:
        rewards: list[float] = []
        for reward, size in zip(topped_up(member), member.turn_tokens, strict=True):
            rewards += [0.0] * (size - 1) + [reward]
        result.append(to_go(rewards, config.gamma))
    return result


def reference_baseline(pool: list[Member], config: LearnerConfig) -> PerToken:
    centre = mean([m.reward for m in pool])
    if max(m.reward for m in pool) - min(m.reward for m in pool) < 1e-9:
        return [same_everywhere(m, 0.0) for m in pool]
    return reference_reinforce([replace(m, reward=m.reward - centre) for m in pool], config)


def reference_turns(pool: list[Member], config: LearnerConfig) -> PerToken:
    gamma = config.gamma if config.adv_estimator == "turn_reinforce" else config.step_gamma
    worth = [to_go(topped_up(m), gamma) for m in pool]
    flat = iter(normal([g for each in worth for g in each], config.norm_std))
    return [spread(m, [next(flat) for _ in each]) for m, each in zip(pool, worth, strict=True)]


def reference_steps(pool: list[Member], config: LearnerConfig) -> PerToken:
    if any(len(m.row_sizes) != len(m.turn_tokens) for m in pool):  # one row per episode
        values = normal([to_go(topped_up(m), config.step_gamma)[0] for m in pool], config.norm_std)
        return [same_everywhere(m, v) for m, v in zip(pool, values, strict=True)]
    return reference_turns(pool, config)


def reference_gigpo(pool: list[Member], config: LearnerConfig) -> PerToken:
    episode = normal([m.reward for m in pool], config.norm_std)
    worth = [to_go(topped_up(m), config.step_gamma) for m in pool]
    anchors: dict[int, list[float]] = {}
    for member, each in zip(pool, worth, strict=True):
        for observation, value in zip(member.observations, each, strict=True):
            anchors.setdefault(observation, []).append(value)
    result = []
    for member, each, e in zip(pool, worth, episode, strict=True):
        steps = []
        for observation, value in zip(member.observations, each, strict=True):
            anchor = anchors[observation]
            s = normal(anchor, config.norm_std)[anchor.index(value)]
            steps.append(config.episode_advantage_weight * e + config.step_advantage_weight * s)
        result.append(spread(member, steps))
    return result


CASES: dict[str, tuple[dict[str, Any], Any]] = {
    "grpo": ({}, over_episodes(lambda pool: normal([m.reward for m in pool]))),
    "rloo": ({}, over_episodes(reference_rloo)),
    "opo": ({}, over_episodes(reference_opo)),
    "remax": ({}, over_episodes(reference_remax)),
    "starpo": ({}, over_episodes(lambda pool: normal([m.reward for m in pool]))),
    "reinforce": ({"gamma": 0.9}, reference_reinforce),
    "reinforce_plus_plus": ({"gamma": 0.95}, reference_reinforce),
    "reinforce_plus_plus_baseline": ({"gamma": 0.9}, reference_baseline),
    "turn_reinforce": ({"gamma": 0.7}, reference_turns),
    "step_reinforce": ({"step_gamma": 0.8}, reference_steps),
    "gigpo": ({"step_advantage_weight": 0.5, "norm_std": False}, reference_gigpo),
}


def test_every_estimator_is_checked() -> None:
    assert {*CASES, "gae"} == set(ESTIMATORS)


@pytest.mark.parametrize("step_rows", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_estimator_equals_its_formula(name: str, step_rows: bool) -> None:
    settings, reference = CASES[name]
    config = LearnerConfig(adv_estimator=name, **settings)  # type: ignore[arg-type]
    num_trained = 0
    for seed in range(12):
        members = make_members(seed, step_rows=step_rows)
        members[seed % len(members)].greedy = name == "remax"
        result = ESTIMATORS[name](as_returns(members), config)
        pool = [member for member in members if member.valid]
        without_baseline = name == "remax" and not any(member.greedy for member in pool)
        if without_baseline or (len(pool) < 2 and ESTIMATORS[name].compares_group is True):
            assert result.verdict is Verdict.TOO_FEW_VALID
        expected = iter(reference(pool, config))
        masks = as_returns(members).loss_masks
        for member, rows, row_masks in zip(members, result.per_token, masks, strict=True):
            found = np.concatenate([v[m != 0] for v, m in zip(rows, row_masks, strict=True)])
            wanted = next(expected) if member.valid else [0.0] * len(found)
            if result.verdict is not Verdict.TRAIN:
                wanted = [0.0] * len(found)
            np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=1e-9)
            assert not any(v[m == 0].any() for v, m in zip(rows, row_masks, strict=True))
        num_trained += result.verdict is Verdict.TRAIN
    assert num_trained >= 6


@pytest.mark.parametrize(
    "name", [name for name in ESTIMATORS if ESTIMATORS[name].compares_group is True and name != "remax"]
)
def test_a_comparison_of_one_or_of_equals_teaches_nothing(name: str) -> None:
    config = LearnerConfig(adv_estimator=name)  # type: ignore[arg-type]
    one = ESTIMATORS[name](as_returns(make_members(0, step_rows=True)), config)
    assert one.verdict is Verdict.TOO_FEW_VALID
    equal = Member(1.0, True, [1.0], [2], [7], [1])
    rounded = replace(equal, reward=float(np.nextafter(1.0, 2.0)))
    for members in ([equal, equal, replace(equal, valid=False)], [equal, rounded]):
        result = ESTIMATORS[name](as_returns(members), config)
        assert result.verdict is Verdict.ZERO_VARIANCE
        assert not any(values.any() for rows in result.per_token for values in rows)


def test_an_estimator_that_compares_nothing_needs_one_valid_row() -> None:
    member = Member(1.5, True, [0.5, 0.5], [1, 2], [0, 1], [2])
    for settings in (
        {"adv_estimator": "reinforce"},
        {"adv_estimator": "starpo", "reward_norm": "none"},
    ):
        config = LearnerConfig(**settings)  # type: ignore[arg-type]
        estimator = ESTIMATORS[config.adv_estimator]
        lonely = estimator(as_returns([member, replace(member, valid=False)]), config)
        assert lonely.verdict is Verdict.TRAIN
        assert lonely.per_token[0][0].tolist() == [0, 0, 1.5, 0, 0, 1.5, 1.5] or (
            settings["adv_estimator"] == "reinforce"
        )
        nobody = estimator(as_returns([replace(member, valid=False)]), config)
        assert nobody.verdict is Verdict.TOO_FEW_VALID


def test_remax_compares_with_the_greedy_member_and_does_not_train_it() -> None:
    members = [Member(r, True, [r], [2], [0], [1]) for r in (0.25, 1.0, 0.0)]
    asked = replace(as_returns(members), greedy=0)
    result = ESTIMATORS["remax"](asked, LearnerConfig(adv_estimator="remax"))
    assert [rows[0].tolist() for rows in result.per_token] == [
        [0, 0, 0, 0],
        [0, 0, 0.75, 0.75],
        [0, 0, -0.25, -0.25],
    ]
    assert ESTIMATORS["remax"](replace(asked, greedy=-1), LearnerConfig()).verdict is (
        Verdict.TOO_FEW_VALID
    )
    broken = replace(asked, is_valid=np.array([False, True, True]))
    assert ESTIMATORS["remax"](broken, LearnerConfig()).verdict is Verdict.TOO_FEW_VALID


def test_gigpo_by_hand() -> None:
    # Two episodes in one maze. Both begin at square 5 and meet again nowhere.
    #   a: 5 -> 6 -> goal, rewards 0, 1:  R 1, G = (0 + 0.95 * 1, 1) = (0.95, 1)
    #   b: 5 -> 9 -> 9, rewards 0, 0, 0:  R 0, G = (0, 0, 0)
    # E: mean 0.5, std sqrt(0.5) = 0.7071: +0.7071 and -0.7071 (each over 0.7071 + 1e-6).
    # Anchor 5: G 0.95 and 0, mean 0.475, std 0.67175: S = +-0.7071. Anchor 6: alone, 0.
    # Anchor 9: twice worth 0, S = 0.
    a = Member(1.0, True, [0.0, 1.0], [1, 1], [5, 6], [1, 1])
    b = Member(0.0, True, [0.0, 0.0, 0.0], [1, 1, 1], [5, 9, 9], [1, 1, 1])
    result = ESTIMATORS["gigpo"](as_returns([a, b]), LearnerConfig(adv_estimator="gigpo"))
    found = [[float(row[-1]) for row in rows] for rows in result.per_token]
    half = 0.5**0.5
    assert found[0] == pytest.approx([2 * half, half], abs=5e-6)
    assert found[1] == pytest.approx([-2 * half, -half, -half], abs=5e-6)


@pytest.mark.parametrize("reward", [0.3, 33.3, 1000.1, 1e9 + 0.1])
@pytest.mark.parametrize("kind", ["row", "rows", "tree"])
def test_what_float32_leaves_of_equal_returns_is_no_step_advantage(kind: str, reward: float) -> None:
    """Rewards of turns travel as float32, returns as float64: their difference is on the last turn."""
    sizes = [1, 1] if kind == "rows" else [2]
    rewards = ([reward, 0.0], [0.0, 0.0], [reward, 0.0])
    given = as_returns([Member(each[0], True, each, [1, 1], [1, 2], sizes) for each in rewards])
    turns = tuple(tuple(_narrowed(row, is_tree=kind == "tree") for row in rows) for rows in given.turns)
    config = LearnerConfig(adv_estimator="gigpo", step_gamma=1.0, episode_advantage_weight=0.0)
    result = ESTIMATORS["gigpo"](replace(given, turns=turns), config)
    found = [[one for row in rows for one in row if one] for rows in result.per_token]
    third = 3.0**-0.5  # of the first turns: x, 0 and x less their mean, over their deviation
    assert [len(each) for each in found] == [1, 1, 1]
    np.testing.assert_allclose(np.concatenate(found), [third, -2 * third, third], rtol=1e-4)


def _narrowed(row: Turns, *, is_tree: bool) -> Turns:
    """The turns as they arrive."""
    after = np.cumsum(row.rewards[::-1])[::-1].astype(np.float32).astype(np.float64)
    rewards = row.rewards.astype(np.float32).astype(np.float64)
    return replace(row, rewards=rewards, turn_returns=after if is_tree else None)


def valued(members: list[Member], seed: int) -> Returns:
    """Random values and token rewards, which must not be read where the mask is 0."""
    returns = as_returns(members)
    rng = np.random.default_rng(seed)

    def drawn() -> Any:
        return tuple(
            tuple(np.where(mask != 0, rng.normal(size=len(mask)), np.nan) for mask in masks)
            for masks in returns.loss_masks
        )

    return replace(returns, values=drawn(), token_rewards=drawn())


def reference_gae(rewards: list[float], values: list[float], gamma: float, lambd: float) -> list[float]:
    """The sum over all later errors, written out."""
    deltas = [
        r + gamma * (values[t + 1] if t + 1 < len(values) else 0.0) - values[t]
        for t, r in enumerate(rewards)
    ]
    return to_go(deltas, gamma * lambd)


def tokens_of(returns: Returns, member: int) -> Callable[[Any], list[float]]:
    """Picks the values of a member's policy tokens, of all its rows in order."""

    def tokens(values: Any) -> list[float]:
        pairs = zip(values[member], returns.loss_masks[member], strict=True)
        return [float(value) for row, mask in pairs for value in row[mask != 0]]

    return tokens


@pytest.mark.parametrize("unit", ["token", "turn"])
@pytest.mark.parametrize("step_rows", [False, True])
def test_gae_equals_its_formula(unit: Any, step_rows: bool) -> None:
    critic = CriticArgs()
    config = LearnerConfig(adv_estimator="gae", gae_unit=unit, gamma=0.9, lambd=0.7, critic=critic)
    for seed in range(8):
        members = make_members(seed, step_rows=step_rows)
        returns = valued(members, seed)
        result = ESTIMATORS["gae"](returns, config)
        assert returns.values is not None
        assert returns.token_rewards is not None
        assert result.value_targets is not None
        for index, member in enumerate(members):
            tokens = tokens_of(returns, index)
            advantages, targets = tokens(result.per_token), tokens(result.value_targets)
            if not member.valid:
                assert not any(advantages)
                continue
            values, extra = tokens(returns.values), tokens(returns.token_rewards)
            lasts = np.cumsum(member.turn_tokens) - 1
            for last, reward in zip(lasts, topped_up(member), strict=True):
                extra[last] += reward
            firsts = lasts + 1 - np.array(member.turn_tokens)
            if unit == "token":
                wanted, base = reference_gae(extra, values, 0.9, 0.7), values
            else:
                of_turns = [sum(extra[a : b + 1]) for a, b in zip(firsts, lasts, strict=True)]
                at_turns = [values[a] for a in firsts]
                wanted = spread(member, reference_gae(of_turns, at_turns, 0.9, 0.7))
                base = spread(member, at_turns)
            np.testing.assert_allclose(advantages, wanted, rtol=TOLERANCE, atol=1e-9)
            np.testing.assert_allclose(
                targets, [a + v for a, v in zip(wanted, base, strict=True)], rtol=TOLERANCE, atol=1e-9
            )


def two_turns(values: list[float]) -> Returns:
    """One episode: a turn of two tokens worth 1, a turn of one worth 2."""
    member = Member(3.0, True, [1.0, 2.0], [2, 1], [0, 1], [2])
    returns = as_returns([member])
    placed = np.zeros(len(returns.loss_masks[0][0]))
    placed[returns.loss_masks[0][0] != 0] = values
    return replace(returns, values=((placed,),))


@pytest.mark.parametrize("unit", ["token", "turn"])
def test_gae_skips_the_words_of_the_environment(unit: Any) -> None:
    config = LearnerConfig(
        adv_estimator="gae", gamma=0.9, lambd=0.8, gae_unit=unit, critic=CriticArgs()
    )
    found = ESTIMATORS["gae"](two_turns([0.5, 0.25, 0.125]), config).per_token[0][0]
    last = 2.0 - 0.125
    middle = (1.0 + 0.9 * 0.125 - 0.25) + 0.72 * last
    first = (0.9 * 0.25 - 0.5) + 0.72 * middle
    turn = (1.0 + 0.9 * 0.125 - 0.5) + 0.72 * last
    wanted = [first, middle, last] if unit == "token" else [turn, turn, last]
    np.testing.assert_allclose(found[[2, 3, 6]], wanted, rtol=1e-12)
    assert not found[[0, 1, 4, 5]].any()


@pytest.mark.parametrize("name", ["reinforce", "gae"])
def test_a_turn_whose_tokens_are_all_masked_leaves_its_reward_to_the_turn_before(name: str) -> None:
    mask = np.array([1, 1, 0, 1], np.uint8)
    turns = Turns(np.array([2, 3, 4], np.int32), np.array([1.0, 10.0, 100.0]), np.zeros(0, np.int64))
    returns = Returns(
        rewards=np.array([111.0]),
        is_valid=np.array([True]),
        row_rewards=(np.array([111.0]),),
        loss_masks=((mask,),),
        turns=((turns,),),
    )
    critic = CriticArgs() if name == "gae" else None
    unit: Any = "turn" if name == "gae" else "token"
    config = LearnerConfig(adv_estimator=name, critic=critic, gae_unit=unit)  # type: ignore[arg-type]
    wanted = {"reinforce": [111, 111, 0, 100], "gae": [11 + 0.95 * 100] * 2 + [0, 100]}[name]
    np.testing.assert_allclose(ESTIMATORS[name](returns, config).per_token[0][0], wanted)


def test_returns_are_clipped_and_long_episodes_pay() -> None:
    members = [
        Member(5.0, True, [-4.0, 9.0], [3, 2], [0, 1], [2]),
        Member(0.5, True, [0.5], [9], [0], [1]),
    ]
    asked = as_returns(members)
    assert shaped(asked, LearnerConfig()) is asked
    clipped = shaped(asked, LearnerConfig(reward_clip=1.0))
    assert clipped.rewards.tolist() == [1.0, 0.5]
    assert clipped.row_rewards[0].tolist() == [1.0]
    assert clipped.turns[0][0].rewards.tolist() == [-1.0, 1.0]
    # 9 tokens of at most 10, the last 4 of which cost: 3 / 4 is lost; 5 tokens cost nothing.
    paid = shaped(asked, LearnerConfig(overlong_max_tokens=10, overlong_buffer_tokens=4))
    assert paid.rewards.tolist() == [5.0, -0.25]
    assert paid.row_rewards[1].tolist() == [-0.25]


@pytest.mark.parametrize("in_rows", [False, True])
def test_no_turn_is_worth_more_than_the_clip_whatever_the_end_brought(in_rows: bool) -> None:
    # -4, 9 and 3 more at the end: the last turn is worth 12. Clipped at 1: -1, 1; in all 0.
    member = Member(8.0, True, [-4.0, 9.0], [1, 1], [0, 1], [1, 1] if in_rows else [2])
    given = LearnerConfig(adv_estimator="reinforce", reward_clip=1.0)
    (sequence,) = turn_sequences(shaped(as_returns([member]), given))
    assert sequence.rewards.tolist() == [-1.0, 1.0]
    rows = ESTIMATORS["reinforce"](shaped(as_returns([member]), given), given).per_token[0]
    assert [row[row != 0].tolist() for row in rows] == ([[], [1.0]] if in_rows else [[1.0]])


@pytest.mark.parametrize("in_rows", [False, True])
def test_the_length_penalty_is_paid_after_the_clip_by_the_last_turn(in_rows: bool) -> None:
    member = Member(5.0, True, [-4.0, 9.0], [4, 5], [0, 1], [1, 1] if in_rows else [2])
    given = LearnerConfig(reward_clip=1.0, overlong_max_tokens=10, overlong_buffer_tokens=4)
    (sequence,) = turn_sequences(shaped(as_returns([member]), given))
    assert sequence.rewards.tolist() == [-1.0, 0.25]  # 9 tokens: 3 of the last 4
