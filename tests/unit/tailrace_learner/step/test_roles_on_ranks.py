"""A critic, a reference and a steered weight on two ranks: the same as on one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.strategies.fsdp2 import Fsdp2Strategy
from tailrace_learner.config import CriticArgs, TrainingArgs
from tailrace_learner.core.model.reference import Reference
from tailrace_learner.core.step.critic_trainer import CriticTrainer
from tailrace_learner.core.step.estimates import Roles
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.step import StepTrainer
from tests.unit.tailrace_learner.factory import (
    CPU,
    config,
    make_policy,
    prepared_group,
    random_group,
)
from tests.unit.tailrace_learner.ranks import on_ranks
from tests.unit.tailrace_learner.stepping import make_critic, moved

# A large epsilon: Adam would make equal steps of gradients that are nothing but rounding.
ARGS = TrainingArgs(learning_rate=0.1, adam_epsilon=1e-2, max_grad_norm=0.5)
Trained = tuple[list[torch.Tensor], dict[str, float | None]]


def train(strategy: Strategy, settings: dict[str, Any]) -> Trained:
    """Weights of policy and critic, and metrics, after two steps of three groups."""
    critic_args = CriticArgs(training_args=ARGS, critic_warmup=1)
    given = config(
        training_args=ARGS,
        max_tokens_per_micro_batch=40,
        adv_estimator="gae",
        critic=critic_args,
        **settings,
    )
    policy = strategy.spread(make_policy())
    optimizer = strategy.make_optimizer(policy, ARGS)
    critic = make_critic(make_policy(), critic_args)
    trainer = CriticTrainer(critic, SummedOptimizer.of(critic.parameters, ARGS), given, max_steps=8)
    stepper = StepTrainer(
        policy,
        optimizer,
        given,
        groups_per_step=3,
        max_steps=8,
        ranks=strategy.ranks,
        roles=Roles(Reference(moved(make_policy(), seed=3), given), trainer),
    )
    for step in range(2):
        stepper.begin(step)
        for index in range(3):
            stepper.add(prepared_group(random_group(step * 3 + index), given))
            stepper.work()
        metrics = stepper.finish()
    weights = [strategy.whole(p).clone() for p in policy.model.parameters()]
    return weights + [p.detach().clone() for p in critic.parameters], metrics


def train_sharded(ranks: TorchRanks, settings: dict[str, Any]) -> Trained:
    return train(Fsdp2Strategy(ranks, CPU), settings)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "settings",
    [
        {"init_kl_coef": 0.2, "kl_in": "reward", "num_mini_batches": 2},
        {"init_kl_coef": 0.2, "target_kl": 0.01, "kl_horizon": 9, "ppo_epochs": 2},
    ],
)
def test_two_ranks_train_as_one_does(settings: dict[str, Any]) -> None:
    one = train(Strategy(), settings)
    for found in on_ranks(2, train_sharded, settings):
        for tensor, expected in zip(found[0], one[0], strict=True):
            scale = float(expected.abs().max())
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-5 * scale)
        assert found[1].keys() == one[1].keys()
        for name, value in one[1].items():
            assert found[1][name] == (value if value is None else pytest.approx(value, 1e-4, 1e-6))
