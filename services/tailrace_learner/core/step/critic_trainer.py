"""Trains the critic beside the policy, on the same mini-batches, with an optimizer of its own.

Its loss is divided as the policy's is: gradients are summed and divided once per mini-batch. Values
for advantages, and those that later values are clipped around, are those of the step's start. Over
several ranks every rank has the whole critic and computes all rows, so that all stay equal.
"""

import math
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np
import torch
from torch import Tensor

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.aggregation import row_count, token_weights
from tailrace_learner.core.algorithms.losses.value_clip import value_clip
from tailrace_learner.core.batch.packing import PackedBatch
from tailrace_learner.core.batch.rows import TrainingRow, gathered
from tailrace_learner.core.model.critic import Critic
from tailrace_learner.core.model.policy import StartWeights, row_values
from tailrace_learner.core.step.metric_sums import MetricSums
from tailrace_learner.core.step.optimizer import SummedOptimizer, learning_rate_at
from tailrace_learner.ports import UpdateResult


class CriticTrainer:
    """`begin` a step; `fill` values; `run` and `update` mini-batches; `metrics` at the end."""

    def __init__(
        self, critic: Critic, optimizer: SummedOptimizer, config: LearnerConfig, *, max_steps: int
    ) -> None:
        self.critic = critic
        self.optimizer = optimizer
        self._config = config
        self._max_steps = max_steps
        self._start = StartWeights(critic.parameters)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Starts a step with the weights as they are."""
        self._step = step
        self._sums = MetricSums()  # of the mini-batch
        self._done = MetricSums()  # of those before it
        self._updates: list[UpdateResult] = []
        self._start.forget()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def is_warming_up(self) -> bool:
        """True if the step trains the critic alone."""
        return self._step < self.critic.args.critic_warmup

    @property
    def trains_with_policy(self) -> bool:
        """True if the value loss is part of the policy's own passes."""
        return self.critic.args.shared and not self.is_warming_up

    @property
    def reads_policy(self) -> bool:
        """True if values depend on the policy's weights."""
        return self.critic.args.shared

    def fill(self, rows: Sequence[TrainingRow], policy_start: StartWeights) -> None:
        """Gives rows the values of the step's start."""
        critic = self.critic
        with ExitStack() as stack:
            for start in (self._start, *([policy_start] if self.reads_policy else [])):
                if start.is_kept:
                    stack.enter_context(start.restored())
            parts = list(critic.trunk.passes(rows, self._config))
            answers = row_values(critic.trunk, parts, critic.values, self._config)
            for row, values in answers:
                row.values = values

    def run(self, rows: Sequence[TrainingRow]) -> None:
        """Adds the gradients of the value loss of some rows, in passes of its own."""
        for part in self.critic.trunk.passes(rows, self._config):
            batch = self.critic.trunk.pack(part, self._config)
            with torch.set_grad_enabled(not self.critic.args.shared):
                hidden = self.critic.trunk.hidden(batch)
            self.loss(batch, hidden).backward()  # type: ignore[no-untyped-call]

    def loss(self, batch: PackedBatch, hidden: Tensor) -> Tensor:
        """Summed value loss of a batch, from its hidden states [M, H]."""
        values = self.critic.read(hidden)
        device = values.device
        targets = gathered(batch.rows, lambda row: row.value_targets).to(device)
        old = gathered(batch.rows, lambda row: row.values).to(device)
        terms = value_clip(values, old, targets, self.critic.args.value_clip or math.inf)
        weights = token_weights(batch.rows, self._config).to(device)
        num_tokens = len(values)
        self._sums.add("value_loss", terms.per_token.sum(), num_tokens)
        for name, count in terms.counts.items():
            self._sums.add(name, count, num_tokens)
        return (weights * terms.per_token).sum()

    def discard(self) -> None:
        """Drops all passes of a mini-batch that was not applied yet."""
        self.optimizer.zero_grad(set_to_none=True)
        self._sums = MetricSums()

    def update(self, rows: Sequence[TrainingRow], *, is_last: bool) -> None:
        """Applies a mini-batch's gradients; `is_last`: the step needs no more values."""
        if not self._start.is_kept and not is_last:
            self._start.keep()
        self._done.take(self._sums)
        self._sums = MetricSums()
        args = self.critic.args.training_args
        self._updates.append(
            self.optimizer.update(
                count=row_count(rows, self._config),
                learning_rate=learning_rate_at(self._step, self._max_steps, args),
                max_grad_norm=args.max_grad_norm,
            )
        )

    def metrics(self, rows: Sequence[TrainingRow]) -> dict[str, float | None]:
        """Losses of the step, and the quality of the values at its start.

        `explained_variance` is 1 - var(target - V) / var(target) over the step's trained tokens.
        """
        found: dict[str, float | None] = {"value_loss": None, "explained_variance": None}
        found |= self._done.means()
        if rows:
            targets = gathered(rows, lambda row: row.value_targets).double().numpy()
            values = gathered(rows, lambda row: row.values).double().numpy()
            found["value_mean"] = float(values.mean())
            found["value_target_mean"] = float(targets.mean())
            if (variance := float(targets.var())) > 0:
                found["explained_variance"] = 1.0 - float((targets - values).var()) / variance
        norms = [update.grad_norm for update in self._updates]
        found["critic_grad_norm"] = float(np.mean(norms)) if norms else None
        found["num_skipped_critic_updates"] = float(sum(not one.is_applied for one in self._updates))
        return found
