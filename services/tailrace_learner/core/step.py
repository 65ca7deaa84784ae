"""One learner step: groups are computed as they arrive, the weights change when a mini-batch is full.

Group number i of a step belongs to mini-batch floor(i * num_mini_batches / groups_per_step). Its
gradients are added unnormalised in passes of any size; a full mini-batch is divided once by its
count, clipped and applied. Later epochs repeat the mini-batches. Configurations that compare beyond
a group begin when the step is complete, losses that pick tokens when their mini-batch is. Over several
ranks every rank trains the same groups and computes its share of their rows. Nothing here waits, reads
a clock or does I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.aggregation import row_count
from tailrace_learner.core.estimates import NO_ROLES, Estimates, Roles
from tailrace_learner.core.kl import adapted
from tailrace_learner.core.losses import LOSSES, SELECTIONS
from tailrace_learner.core.optimizer import learning_rate_at
from tailrace_learner.core.passes import PassRunner
from tailrace_learner.core.policy import Policy, StartWeights
from tailrace_learner.core.ranks import ONE_RANK, Shares
from tailrace_learner.core.rows import PreparedGroup, Row
from tailrace_learner.core.step_advantages import finish_advantages
from tailrace_learner.core.step_metrics import Metrics, data_metrics, mean
from tailrace_learner.core.tally import Tally
from tailrace_learner.ports import Optimizer, Ranks, UpdateResult

__all__ = ["Metrics", "StepTrainer"]


@dataclass(slots=True)
class _MiniBatch:
    shares: Shares
    rows: list[Row] = field(default_factory=list)
    waiting: list[Row] = field(default_factory=list)  # not passed yet in this epoch
    loss_sum: float = 0.0  # of this rank's rows


class StepTrainer:
    """Trains one step at a time: `begin`, then `add` groups and `work`, then `finish`."""

    def __init__(
        self,
        policy: Policy,
        optimizer: Optimizer,
        config: LearnerConfig,
        *,
        groups_per_step: int,
        max_steps: int,
        ranks: Ranks = ONE_RANK,
        roles: Roles = NO_ROLES,
        kl_coef: float | None = None,
    ) -> None:
        self.kl_coef = config.init_kl_coef if kl_coef is None else kl_coef
        self._roles = roles
        self._critic = roles.critic
        self._config = config
        self._ranks = ranks
        self._optimizer = optimizer
        self._interpolates = config.proximal_logprobs == "interpolate"
        self._groups_per_step = groups_per_step
        self._max_steps = max_steps
        self._start = StartWeights(policy.parameters)
        self._estimates = Estimates(roles, self._start, config)
        self._selection = SELECTIONS.get(config.loss)
        self._passes = PassRunner(policy, LOSSES[config.loss], config, self._start)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Start over with the weights as they are, after `step` finished steps."""
        self._step = step
        self._groups: list[PreparedGroup] = []
        self._num_estimated = 0
        self._batches = [
            _MiniBatch(Shares(self._ranks.num_ranks)) for _ in range(self._config.num_mini_batches)
        ]
        self._has_advantages = False  # only for configurations that need the whole step
        self._num_updated = 0  # mini-batches whose first epoch is over
        self._tally = Tally()
        self._losses: list[float] = []
        self._updates: list[UpdateResult] = []
        self._start.forget()
        if self._critic is not None:
            self._critic.begin(step)
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def num_missing_groups(self) -> int:
        """Groups that the step still needs."""
        return self._groups_per_step - len(self._groups)

    @property
    def groups(self) -> Sequence[PreparedGroup]:
        """Groups added so far."""
        return self._groups

    def add(self, group: PreparedGroup) -> None:
        """Take a group into the step; costs nothing until `work`."""
        assert self.num_missing_groups > 0
        assert not group.drop_reason
        index = len(self._groups) * self._config.num_mini_batches // self._groups_per_step
        self._groups.append(group)
        self._batches[index].rows += group.rows
        self._batches[index].waiting += group.rows

    def work(self) -> bool:
        """Do all passes and updates that are worth doing now; whether there were any."""
        worked = self._estimate()
        if self._config.waits_for_step and not self._take_advantages():
            return worked
        while self._num_updated < len(self._batches):
            batch = self._batches[self._num_updated]
            is_full = len(self._groups) >= self._end_of(self._num_updated)
            if not is_full and (self._selection or self._too_few(batch)):
                return worked
            worked = True
            self._pass(batch, is_first=True)
            if not is_full:
                return worked
            self._update(batch)
            self._num_updated += 1
        return worked

    def finish(self) -> Metrics:
        """Later epochs, then the step's metrics; the step must have all its groups and `work` done."""
        assert self.num_missing_groups == 0
        assert self._num_updated == len(self._batches)
        for _ in range(1, self._config.ppo_epochs):
            for batch in self._batches:
                batch.waiting = list(batch.rows)
                self._pass(batch, is_first=False)
                self._update(batch)
        metrics = self._metrics()
        self._adapt(metrics)
        if self._config.needs_reference:
            metrics["kl_coef"] = self.kl_coef
        return metrics

    def _estimate(self) -> bool:
        """Complete the advantages of groups that need a model's opinion; whether there were any."""
        if not self._config.needs_estimates or self._num_estimated == len(self._groups):
            return False
        self._estimates.complete(self._groups[self._num_estimated :], self.kl_coef)
        self._num_estimated = len(self._groups)
        return True

    def _adapt(self, metrics: Metrics) -> None:
        """Steer the weight of the divergence for the next step."""
        config, kl = self._config, metrics["kl"]
        if config.target_kl and kl is not None:
            num_episodes = sum(len(group.rewards) for group in self._groups)
            self.kl_coef = adapted(self.kl_coef, kl, config.target_kl, num_episodes, config.kl_horizon)

    def _take_advantages(self) -> bool:
        """Finish the advantages when the step is complete; whether they are."""
        if not self._has_advantages and not self.num_missing_groups:
            finish_advantages(self._groups, self._config)
            self._has_advantages = True
        return self._has_advantages

    def _end_of(self, index: int) -> int:
        """Number of groups that complete mini-batches 0 to `index`."""
        return math.ceil((index + 1) * self._groups_per_step / self._config.num_mini_batches)

    def _too_few(self, batch: _MiniBatch) -> bool:
        num_tokens = sum(len(row.token_ids) for row in batch.waiting)
        return not num_tokens or num_tokens < self._config.min_tokens_per_micro_batch

    def _pass(self, batch: _MiniBatch, *, is_first: bool) -> None:
        if self._critic is not None and not self._critic.trains_with_policy:
            self._critic.run(batch.waiting)
        if not self._is_warming_up:
            self._pass_policy(batch, is_first=is_first)
        batch.waiting = []

    @property
    def _is_warming_up(self) -> bool:
        """Whether the policy is left alone in this step."""
        return self._critic is not None and self._critic.is_warming_up

    def _pass_policy(self, batch: _MiniBatch, *, is_first: bool) -> None:
        config, critic = self._config, self._critic
        if self._selection and batch.waiting:
            self._passes.pick(self._selection, batch.waiting)
        is_measured = is_first and not (self._interpolates and self._updates)
        parts = batch.shares.passes(batch.waiting, self._ranks.rank, self._passes.micro_batches)
        if config.needs_reference and self._roles.reference is not None:
            self._roles.reference.fill([row for part in parts for row in part])
        for rows in parts:
            if rows:
                batch.loss_sum += self._passes.run(
                    rows,
                    self._tally,
                    is_first=is_measured,
                    kl_coef=self.kl_coef if config.kl_in == "loss" else 0.0,
                    value_loss=critic.loss if critic and critic.trains_with_policy else None,
                )
            else:
                self._passes.idle(batch.waiting[0], is_first=is_first)

    def _update(self, batch: _MiniBatch) -> None:
        """Apply the mini-batch's gradients; without rows there are none and nothing changes."""
        if not batch.rows:
            return
        if self._critic is not None:
            self._critic.update(batch.rows, is_last=not self.num_missing_groups)
        if not self._is_warming_up:
            self._update_policy(batch)

    def _update_policy(self, batch: _MiniBatch) -> None:
        is_last = len(self._updates) + 1 == self._config.num_mini_batches * self._config.ppo_epochs
        if not self._start.is_kept and not is_last and self._is_start_needed():
            self._start.keep()
        args = self._config.training_args
        count = row_count(batch.rows, self._config)
        self._losses.append(batch.loss_sum / count)
        batch.loss_sum = 0.0
        self._updates.append(
            self._optimizer.update(
                count=count,
                learning_rate=learning_rate_at(self._step, self._max_steps, args),
                max_grad_norm=args.max_grad_norm,
            )
        )

    def _is_start_needed(self) -> bool:
        """Whether rows without log pi_old may come: in the first epoch, before the last mini-batch."""
        is_wanted = not self._interpolates or (self._critic is not None and self._critic.reads_policy)
        return is_wanted and self._num_updated + 1 < len(self._batches)

    def _metrics(self) -> Metrics:
        rows = [row for batch in self._batches for row in batch.rows]
        metrics: Metrics = {"kl": None, "mismatch_kl": None, "behaviour_kl": None, "entropy": None}
        metrics |= Tally.of_all(self._ranks.collect(self._tally.totals())).means()
        metrics |= data_metrics(self._groups, rows)
        metrics["loss"] = mean(self._ranks.sums(self._losses))
        metrics["grad_norm"] = mean([update.grad_norm for update in self._updates])
        metrics["num_skipped_updates"] = float(sum(not update.is_applied for update in self._updates))
        metrics["learning_rate"] = learning_rate_at(
            self._step, self._max_steps, self._config.training_args
        )
        if self._critic is not None:
            metrics |= self._critic.metrics(rows)
        return metrics
