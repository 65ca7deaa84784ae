"""Keys that act before or beside the policy loss: changing one changes what a step trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from tailrace_learner.config import CriticArgs, TrainingArgs
from tailrace_protos.episode import OVER_BUDGET
from tailrace_protos.trajectory import Trajectory, TrajectoryGroup
from tests.unit.tailrace_learner.factory import random_group
from tests.unit.tailrace_learner.stepping import ARGS, Stepper, weights

GROUPS = [random_group(index) for index in range(2)]
GAE: dict[str, Any] = {"adv_estimator": "gae", "critic": CriticArgs(training_args=ARGS)}
KL: dict[str, Any] = {"init_kl_coef": 0.3}
PAID: dict[str, Any] = {**KL, "kl_in": "reward", "adv_estimator": "reinforce"}
STEERED: dict[str, Any] = {**KL, "target_kl": 0.001, "kl_horizon": 20}

LIVE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"norm_std": False}),
    ({"adv_estimator": "gigpo"}, {"norm_std": False}),
    ({"adv_estimator": "turn_reinforce"}, {"norm_std": False}),
    ({"adv_estimator": "step_reinforce"}, {"norm_std": False}),
    ({}, {"reward_clip": 0.3}),
    ({}, {"advantage_clip": 0.3}),
    ({}, {"overlong_max_tokens": 8, "overlong_buffer_tokens": 4}),
    ({"overlong_max_tokens": 8, "overlong_buffer_tokens": 4}, {"overlong_buffer_tokens": 8}),
    ({"overlong_max_tokens": 8, "overlong_buffer_tokens": 4}, {"overlong_max_tokens": 12}),
    ({"adv_estimator": "reinforce"}, {"gamma": 0.5}),
    ({"adv_estimator": "gigpo"}, {"step_gamma": 0.5}),
    ({"adv_estimator": "gigpo"}, {"episode_advantage_weight": 0.2}),
    ({"adv_estimator": "gigpo"}, {"step_advantage_weight": 0.2}),
    ({"adv_estimator": "starpo"}, {"reward_norm": "mean"}),
    ({"adv_estimator": "starpo"}, {"reward_grouping": "batch"}),
    (GAE, {"gamma": 0.5}),
    (GAE, {"lambd": 0.1}),
    (GAE, {"gae_unit": "turn"}),
    ({}, KL),
    (KL, {"kl_estimator": "abs"}),
    (KL, {"init_kl_coef": 0.9}),
    ({**KL, "adv_estimator": "reinforce"}, {"kl_in": "reward"}),
    ({**KL, "adv_estimator": "reinforce_plus_plus_baseline"}, {"kl_in": "reward"}),
    ({**KL, "adv_estimator": "reinforce_plus_plus"}, {"kl_in": "loss"}),
    (PAID, {"kl_estimator": "k1"}),
    (KL, STEERED),
    (STEERED, {"target_kl": 100.0}),
    (STEERED, {"kl_horizon": 40}),
]
OF_CRITIC: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"value_clip": 0.0}),
    ({}, {"critic_warmup": 1}),
    ({}, {"training_args": TrainingArgs(learning_rate=1e-4)}),
    ({}, {"shared": True}),
    ({"shared": True}, {"value_loss_coef": 0.9}),
]


KNOWN: dict[str, torch.Tensor] = {}  # weights by settings: many cases change one key of the same


def trained(settings: dict[str, Any], groups: Sequence[TrajectoryGroup] = GROUPS) -> torch.Tensor:
    """Weights of policy and critic after two steps."""
    name = repr(sorted(settings.items()))
    if groups is not GROUPS:
        return trained_anew(settings, groups)
    if name not in KNOWN:
        KNOWN[name] = trained_anew(settings, groups)
    return KNOWN[name]


def trained_anew(settings: dict[str, Any], groups: Sequence[TrajectoryGroup]) -> torch.Tensor:
    stepper = Stepper(2, ppo_epochs=2, **settings)
    for number in range(2):
        stepper.step(groups, 2, number=number)
    critic = stepper.critic.critic.parameters if stepper.critic else []
    return weights([*stepper.policy.parameters, *critic])


def name_of(case: tuple[dict[str, Any], dict[str, Any]]) -> str:
    return "-".join([str(case[0].get("adv_estimator", "")), *case[1]])


@pytest.mark.parametrize(("base", "change"), LIVE, ids=[name_of(case) for case in LIVE])
def test_changing_a_key_changes_the_weights(base: dict[str, Any], change: dict[str, Any]) -> None:
    assert not torch.equal(trained(base), trained({**base, **change}))


def test_masking_cut_off_episodes_changes_the_weights() -> None:
    def cut(member: Trajectory) -> Trajectory:
        return replace(member, metrics={**member.metrics, OVER_BUDGET: 1.0})

    groups = [replace(each, members=(cut(each.members[0]), *each.members[1:])) for each in GROUPS]
    train, mask = (trained({"over_budget_episodes": choice}, groups) for choice in ("train", "mask"))
    assert not torch.equal(train, mask)
    assert torch.equal(trained({"over_budget_episodes": "mask"}), trained({}))  # none was cut off


@pytest.mark.parametrize(("base", "change"), OF_CRITIC, ids=[next(iter(c)) for _, c in OF_CRITIC])
def test_changing_a_key_of_the_critic_does_too(base: dict[str, Any], change: dict[str, Any]) -> None:
    critic = CriticArgs(**{"training_args": ARGS, "value_clip": 0.01, **base})
    other = msgspec.structs.replace(critic, **change)
    left, right = (trained({"adv_estimator": "gae", "critic": each}) for each in (critic, other))
    assert left.shape != right.shape or not torch.equal(left, right)
