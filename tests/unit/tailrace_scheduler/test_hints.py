"""Health hints: each is raised by its cause, names a setting, and does not flap."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from tailrace_protos.episode import Outcome
from tailrace_protos.event import Event, EventBody, GroupDropped, StepFinished
from tailrace_scheduler.core.hints import HINTS, NUM_EPISODES, HintBoard
from tests.unit.tailrace_scheduler.simulation import made_settlement


class World:
    """A board that is fed with episodes and steps."""

    def __init__(self) -> None:
        self.board = HintBoard()
        self.names = itertools.count()

    def happen(self, body: EventBody) -> None:
        self.board.apply(Event(f"{next(self.names)}-0", 0.0, "test", body))

    def episodes(self, num: int = 2 * NUM_EPISODES, **values: Any) -> None:
        for _ in range(num):
            settled = made_settlement(f"t{next(self.names)}", 0)
            self.happen(msgspec.structs.replace(settled, **values))

    def steps(self, num: int = 10, **metrics: float) -> None:
        for _ in range(num):
            step = next(self.names)
            self.happen(StepFinished("L", step, step, (), 0, 0.0, 0.0, dict(metrics)))

    def changes(self) -> list[tuple[str, bool]]:
        return [(change.name, change.is_raised) for _, change in self.board.take_changes()]


def of_episodes(**values: Any) -> Any:
    return lambda world: world.episodes(**values)


def of_steps(**metrics: float) -> Any:
    return lambda world: world.steps(**metrics)


CUT = {"outcome": Outcome.POLICY_FAILURE, "reason": "max_new_tokens: 4096 tokens were sampled"}
CASES = {
    "failing_episodes": (
        of_episodes(),
        of_episodes(outcome=Outcome.INFRA_FAILURE, reason="env.step raised OSError: gone"),
        "env.step raised OSError: gone",
    ),
    "no_tool_calls": (
        of_episodes(num_tool_calls=2),
        of_episodes(num_tool_calls=0),
        "from 2.00 to 0.00",
    ),
    "few_turns": (of_episodes(num_turns=6), of_episodes(num_turns=1), "from 6.0 to 1.0 turns"),
    "equal_groups": (
        of_steps(num_groups=8.0, num_groups_zero_variance=2.0),
        of_steps(num_groups=8.0, num_groups_zero_variance=8.0),
        "learner.zero_variance_groups",
    ),
    "cut_replies": (of_episodes(), of_episodes(num_cut_replies=1), "max_tokens_per_step"),
    "episode_limit": (of_episodes(), of_episodes(**CUT), "agents.generating_args.max_new_tokens"),
    "low_entropy": (of_steps(entropy=0.8), of_steps(entropy=0.01), "learner.entropy_loss_coef"),
    "high_entropy": (of_steps(entropy=0.5), of_steps(entropy=3.0), "learner.entropy_loss_coef"),
    "engines_differ": (
        of_steps(num_trained_tokens=90.0),
        of_steps(num_servers_beyond_mismatch=1.0),
        "learner.max_mismatch",
    ),
    "masked_tokens": (
        of_steps(mis_masked_fraction=0.01),
        of_steps(mis_masked_fraction=0.5),
        "the correction masks",
    ),
    "stale_tokens": (
        of_steps(num_trained_tokens=90.0, num_stale_tokens=1.0),
        of_steps(num_trained_tokens=50.0, num_stale_tokens=50.0),
        "max_staleness",
    ),
    "skipped_updates": (
        of_steps(num_updates=2.0, num_skipped_updates=0.0),
        of_steps(num_updates=2.0, num_skipped_updates=2.0),
        "learning_rate",
    ),
}


def test_every_hint_has_a_case() -> None:
    assert sorted(CASES) == sorted(hint.name for hint in HINTS)
    assert all(hint.holds_above < hint.raised_from for hint in HINTS)


@pytest.mark.parametrize("name", CASES)
def test_a_hint_is_raised_once_by_its_cause_and_goes_with_it(name: str) -> None:
    well, badly, expected = CASES[name]
    world = World()
    well(world)
    assert world.changes() == []
    badly(world)
    badly(world)
    assert world.changes() == [(name, True)]
    (text,) = world.board.texts
    assert expected in text
    well(world)
    assert world.changes() == [(name, False)]
    assert world.board.texts == ()


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("env.step raised OSError: gone", "agents*.log"),
        ("reward: 'judge' took longer than 10 s", "reward.rewards.*.timeout_s"),
        ("generation c1 failed 10 times; at last: no server", "agents.max_generation_attempts"),
    ],
)
def test_failing_episodes_name_what_to_look_at(reason: str, remedy: str) -> None:
    world = World()
    world.episodes(outcome=Outcome.INFRA_FAILURE, reason=reason)
    (text,) = world.board.texts
    assert remedy in text
    assert text.endswith(reason)


def test_a_hint_does_not_flap_between_its_two_bounds() -> None:
    world = World()
    world.steps(num_groups=20.0, num_groups_zero_variance=19.0)
    world.changes()
    for num_equal in (17.0, 19.0, 17.0, 16.0, 18.0):
        world.steps(num_groups=20.0, num_groups_zero_variance=num_equal)
    assert world.changes() == []


def test_groups_drawn_again_count_as_equal() -> None:
    world = World()
    for _ in range(10):
        for _ in range(80):
            world.happen(GroupDropped("g", "zero_variance"))
        world.steps(1, num_groups=4.0, num_groups_zero_variance=0.0)
    assert world.changes() == [("equal_groups", True)]
    (text,) = world.board.texts
    assert "learner.zero_variance_groups" not in text  # that is done already
    assert "learner.entropy_loss_coef" in text


def test_steps_of_one_reward_are_equal_groups_where_no_estimator_compares_groups() -> None:
    world = World()
    world.steps(num_groups=4.0, num_groups_zero_variance=0.0, reward_std=1e-17)
    assert world.changes() == [("equal_groups", True)]
    (text,) = world.board.texts
    assert "100% of the groups have equal rewards" in text
    assert "check the reward" in text
    assert "learner.zero_variance_groups" not in text  # such an estimator does not read it
    world.steps(num_groups=4.0, num_groups_zero_variance=0.0, reward_std=0.2)
    assert world.changes() == [("equal_groups", False)]


def test_every_change_has_an_id_of_its_own() -> None:
    world = World()
    ids = []
    for _ in range(3):
        world.episodes()
        world.episodes(num_cut_replies=1)
        ids += [once for once, _ in world.board.take_changes()]
    assert len(ids) == len(set(ids)) == 5
