"""One step of a trainer with roles, and what it did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tailrace_learner.config import CriticArgs, LearnerConfig, TrainingArgs
from tailrace_learner.core.batch.packing import pack
from tailrace_learner.core.model.critic import Critic, make_head
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.model.reference import Reference
from tailrace_learner.core.step.critic_trainer import CriticTrainer
from tailrace_learner.core.step.estimates import Roles
from tailrace_learner.core.step.optimizer import SummedOptimizer
from tailrace_learner.core.step.step import StepTrainer
from tailrace_protos.trajectory import TrajectoryGroup
from tests.unit.tailrace_learner.factory import CPU, config, make_model, make_policy, prepared_group

ARGS = TrainingArgs(learning_rate=1e-2, max_grad_norm=0.0)
SHARED_WEIGHT = 0.5


def moved(policy: PolicyModel, seed: int, scale: float = 0.02) -> PolicyModel:
    """The policy with noise on its weights."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter += scale * torch.randn(parameter.shape, generator=generator)
    return policy


def make_critic(policy: PolicyModel, args: CriticArgs, *, knows: bool = True) -> Critic:
    """A critic whose trunk differs from the policy; `knows`: its head is not 0."""
    trunk = policy
    if not args.shared:
        trunk = moved(PolicyModel(make_model().base_model, CPU, 1.0, 7), seed=5)
    head = make_head(32, CPU)
    if knows:
        nn.init.normal_(head.weight, std=0.2, generator=torch.Generator().manual_seed(1))
    return Critic(trunk, head, args)


@dataclass
class Stepped:
    """A step that is over."""

    policy: PolicyModel
    critic: CriticTrainer | None
    trainer: StepTrainer
    metrics: dict[str, float | None]
    grads: list[torch.Tensor]  # the policy's at every update
    critic_grads: list[torch.Tensor]


class Stepper:
    """A policy, a reference some way off, a critic where the settings have one, and their trainer."""

    def __init__(self, num_groups: int, *, knows: bool = True, **settings: Any) -> None:
        self.config: LearnerConfig = config(training_args=ARGS, **settings)
        self.policy = make_policy()
        self.optimizer = SummedOptimizer.of(self.policy.parameters, ARGS)
        self.grads = _kept(self.optimizer, self.policy.parameters)
        self.critic: CriticTrainer | None = None
        self.critic_grads: list[torch.Tensor] = []
        if self.config.critic is not None:
            critic = make_critic(self.policy, self.config.critic, knows=knows)
            optimizer = SummedOptimizer.of(critic.parameters, self.config.critic.training_args)
            self.critic_grads = _kept(optimizer, critic.parameters)
            self.critic = CriticTrainer(critic, optimizer, self.config, max_steps=10)
        reference = None
        if self.config.needs_reference:
            reference = Reference(moved(make_policy(), seed=3), self.config)
        self.trainer = StepTrainer(
            self.policy,
            self.optimizer,
            self.config,
            groups_per_step=num_groups,
            max_steps=10,
            roles=Roles(reference, self.critic),
        )

    def step(self, groups: Sequence[TrajectoryGroup], at_once: int, number: int = 0) -> Stepped:
        """Groups come `at_once` at a time."""
        self.trainer.begin(number)
        for start in range(0, len(groups), at_once):
            for each in groups[start : start + at_once]:
                self.trainer.add(prepared_group(each, self.config))
            self.trainer.work()
        metrics = self.trainer.finish()
        return Stepped(self.policy, self.critic, self.trainer, metrics, self.grads, self.critic_grads)

    @property
    def rows(self) -> list[Any]:
        """All rows of the step."""
        return [row for group in self.trainer.groups for row in group.rows]


def stepped(groups: Sequence[TrajectoryGroup], at_once: int = 99, **settings: Any) -> Stepped:
    """One step of a new trainer."""
    return Stepper(len(groups), **settings).step(groups, at_once)


def shared_tokens(step: Stepped) -> int:
    """Number of tokens of the step's rows that shared prefixes save."""
    rows = [row for group in step.trainer.groups for row in group.rows]
    alone, shared = (
        pack(rows, CPU, share_prefixes=shares).input_ids.numel() for shares in (False, True)
    )
    return alone - shared


def weights(parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in parameters]).clone()


def distance(left: torch.Tensor, right: torch.Tensor) -> float:
    """Relative to the right one."""
    return float((left - right).norm() / right.norm())


def _kept(optimizer: SummedOptimizer, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []

    def keep(*_: object) -> None:
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        seen.append(torch.cat([grad.flatten() for grad in grads]).clone())

    optimizer.inner.register_step_pre_hook(keep)
    return seen
