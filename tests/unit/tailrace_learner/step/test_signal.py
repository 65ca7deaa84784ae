"""`num_signal_tokens`: the trained tokens of a step that a reward moves."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from tailrace_learner.config import CriticArgs, ReferenceArgs
from tailrace_protos.base import as_float32, pack_float32
from tailrace_protos.trajectory import Trajectory, TrajectoryGroup
from tests.unit.tailrace_learner.factory import group, random_group
from tests.unit.tailrace_learner.stepping import Stepper, stepped

CRITIC = CriticArgs()
SFT = "tailrace_learner.core.algorithms.losses.sft:LOSS"
PLUS_PLUS: dict[str, Any] = {"adv_estimator": "reinforce_plus_plus"}
OVER_STEP: dict[str, Any] = {"adv_estimator": "starpo", "reward_grouping": "batch"}


def rewarded(member: Trajectory, reward: float) -> Trajectory:
    """The member with this reward, given in its last turn."""
    (row,) = member.rows
    turn_rewards = 0.0 * as_float32(row.turn_rewards)
    turn_rewards[-1] = reward
    row = replace(row, reward=reward, turn_rewards=pack_float32(turn_rewards))
    return replace(member, reward=reward, rows=(row,))


def groups_of(*rewards: float) -> list[TrajectoryGroup]:
    """Two groups, whose members have these rewards in turn."""
    made = []
    for index in range(2):
        given = random_group(index, num_members=4)
        members = [rewarded(m, rewards[m.member % len(rewards)]) for m in given.members]
        made.append(group(members, index))
    return made


@pytest.mark.parametrize(
    ("reward", "settings"),
    [
        (1.0, {"init_kl_coef": 0.1}),  # `grpo` keeps the tokens near the reference
        (0.0, {"init_kl_coef": 0.1, "entropy_loss_coef": 0.01}),
        (0.0, {"adv_estimator": "reinforce"}),
        (0.0, {"adv_estimator": "reinforce", "init_kl_coef": 0.1, "kl_in": "reward"}),
        (1.0, PLUS_PLUS),
        (1.0, {**PLUS_PLUS, "init_kl_coef": 0.1}),  # in the reward: whitening leaves it alone
        (1.0, OVER_STEP),
        (1.0, {**OVER_STEP, "reward_grouping": "tags", "whiten_advantages": True}),
        (0.0, {"adv_estimator": "starpo", "reward_norm": "none"}),
        (0.0, {"adv_estimator": "gae", "critic": CRITIC}),  # its values begin at 0 and stay there
    ],
)
def test_a_step_of_equal_rewards_has_no_signal(reward: float, settings: dict[str, Any]) -> None:
    metrics = stepped(groups_of(reward), knows=False, **settings).metrics
    assert metrics["num_trained_tokens"]
    assert metrics["num_signal_tokens"] == 0


@pytest.mark.parametrize(
    ("rewards", "settings"),
    [
        ((1.0, 0.0), {}),
        ((1.0, 0.0), {"init_kl_coef": 0.1}),
        ((1.0, 0.0), PLUS_PLUS),
        ((1.0, 0.0), {**PLUS_PLUS, "init_kl_coef": 0.1}),
        ((1.0, 0.0), OVER_STEP),
        ((1.0,), {"adv_estimator": "reinforce"}),  # it has no baseline
        ((1.0,), {"adv_estimator": "gae", "critic": CRITIC}),  # the critic learns them
        ((0.0,), {"adv_estimator": "reinforce", "loss": SFT}),  # it reads no advantages
        ((0.0,), {"init_kl_coef": 0.1, "reference": ReferenceArgs(pretrain="teacher")}),
    ],
)
def test_a_step_that_teaches_has_a_signal(rewards: tuple[float, ...], settings: dict[str, Any]) -> None:
    metrics = stepped(groups_of(*rewards), knows=False, **settings).metrics
    assert metrics["num_signal_tokens"]


def test_only_tokens_with_an_advantage_count() -> None:
    """A group that differs, and one of equal rewards that is kept near the reference."""
    differs, equal = groups_of(1.0, 0.0)[0], groups_of(1.0)[1]
    stepper = Stepper(2, init_kl_coef=0.1)
    metrics = stepper.step([differs, equal], 1).metrics
    num_tokens = [sum(len(row.targets) for row in each.rows) for each in stepper.trainer.groups]
    assert metrics["num_signal_tokens"] == num_tokens[0]
    assert metrics["num_trained_tokens"] == sum(num_tokens)
