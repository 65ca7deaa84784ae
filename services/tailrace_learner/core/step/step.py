"""One learner step: groups are computed as they arrive, and a full mini-batch changes the weights.

Group number i of a step belongs to mini-batch floor(i * num_mini_batches / groups_per_step). Its
gradients are added unnormalised in passes of any size. A full mini-batch is divided once by its
count, clipped and applied. If its passes show that a server sampled with other weights than it
reports, they are dropped and done again without that server's tokens. Later epochs repeat the
mini-batches. Configurations that compare beyond a group begin when the step is complete, losses that
pick tokens when their mini-batch is. Over several ranks every rank trains the same groups and
computes its share of their rows. Nothing here waits, reads a clock or does I/O.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.aggregation import row_count
from tailrace_learner.core.algorithms.kl import adapted
from tailrace_learner.core.algorithms.metrics import Metrics, StepData, data_metrics
from tailrace_learner.core.batch.ranks import ONE_RANK, Shares
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow
from tailrace_learner.core.mismatch.quarantine import without_wrong
from tailrace_learner.core.model.policy import PolicyModel
from tailrace_learner.core.step.estimates import NO_ROLES, Estimates, Roles
from tailrace_learner.core.step.policy_trainer import PolicyTrainer
from tailrace_learner.core.step.step_advantages import finish_advantages
from tailrace_learner.ports import Ranks, WeightUpdater
from tailrace_protos.event import ServerQuarantined

MetricFunction = Callable[[StepData], Metrics]


@dataclass(slots=True)
class _MiniBatch:
    shares: Shares
    rows: list[TrainingRow] = field(default_factory=list)
    waiting: list[TrainingRow] = field(default_factory=list)  # not passed yet in this epoch
    loss_sum: float = 0.0  # of this rank's rows
    untrained: list[int] = field(default_factory=list)  # tokens of rows that only the divisor counts


class StepTrainer:
    """Trains one step at a time: `begin`, then `add` groups and `work`, then `finish`.

    `roles` are the models beside the policy, `kl_coef` is the weight of the divergence to continue
    with. Servers are also read under the weights of `num_old_versions` steps before.
    """

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: WeightUpdater,
        config: LearnerConfig,
        *,
        groups_per_step: int,
        max_steps: int,
        ranks: Ranks = ONE_RANK,
        roles: Roles = NO_ROLES,
        kl_coef: float | None = None,
        num_old_versions: int = 0,
        own_metrics: Sequence[MetricFunction] = (),
    ) -> None:
        self._config = config
        self._own_metrics = own_metrics
        self._groups_per_step = groups_per_step
        self._num_ranks = ranks.num_ranks
        self._kl_coef = config.init_kl_coef if kl_coef is None else kl_coef
        self._policy = PolicyTrainer(
            policy,
            optimizer,
            config,
            roles,
            ranks,
            max_steps=max_steps,
            num_old_versions=num_old_versions,
        )
        self._critic = roles.critic
        self._estimates = Estimates(roles, self._policy.start, config)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Starts a step with the weights as they are, after `step` finished steps."""
        self._step = step
        self._groups: list[PreparedGroup] = []
        self._num_estimated = 0
        self._batches = [
            _MiniBatch(Shares(self._num_ranks)) for _ in range(self._config.num_mini_batches)
        ]
        self._has_advantages = False  # only for configurations that need the whole step
        self._num_updated = 0  # mini-batches whose first epoch is over
        self._policy.begin(step)
        if self._critic is not None:
            self._critic.begin(step)

    @property
    def num_missing_groups(self) -> int:
        """Groups that the step still needs."""
        return self._groups_per_step - len(self._groups)

    @property
    def groups(self) -> Sequence[PreparedGroup]:
        """Groups added so far."""
        return self._groups

    @property
    def quarantined(self) -> Sequence[ServerQuarantined]:
        """Servers found wrong in this step; groups added from now on must come without their tokens."""
        return self._policy.sentinel.found

    def add(self, group: PreparedGroup) -> None:
        """Takes a group into the step; costs nothing until `work`."""
        assert self.num_missing_groups > 0
        assert not group.drop_reason
        index = self._batch_of(len(self._groups))
        self._groups.append(group)
        self._batches[index].rows += group.rows
        self._batches[index].waiting += group.rows
        self._batches[index].untrained += group.untrained

    def work(self) -> bool:
        """Does all passes and updates that are due now; returns whether there were any."""
        worked = self._estimate()
        if self._config.waits_for_step and not self._take_advantages():
            return worked
        while self._num_updated < len(self._batches):
            batch = self._batches[self._num_updated]
            is_full = len(self._groups) >= self._end_of(self._num_updated)
            if not is_full and (self._policy.picks_tokens or self._too_few(batch)):
                return worked
            worked = True
            self._pass(batch, is_first=True)
            if not is_full:
                return worked
            if self._policy.judge(batch.rows):
                self._pass_again(batch)
            self._update(batch)
            self._num_updated += 1
        return worked

    def finish(self) -> Metrics:
        """Does later epochs and returns the metrics of a step whose groups are all worked on."""
        assert self.num_missing_groups == 0
        assert self._num_updated == len(self._batches)
        if self._config.ppo_epochs > 1 and self.quarantined:
            self._leave_out_wrong(0)
        for _ in range(1, self._config.ppo_epochs):
            for batch in self._batches:
                batch.waiting = list(batch.rows)
                self._pass(batch, is_first=False)
                self._update(batch)
        return self._metrics()

    def _estimate(self) -> bool:
        """Completes the advantages of groups that need models; returns whether there were any."""
        if not self._config.needs_estimates or self._num_estimated == len(self._groups):
            return False
        self._estimates.complete(self._groups[self._num_estimated :], self._kl_coef)
        self._num_estimated = len(self._groups)
        return True

    def _take_advantages(self) -> bool:
        """Finishes the advantages when the step is complete; returns whether they are."""
        if not self._has_advantages and not self.num_missing_groups:
            finish_advantages(self._groups, self._config)
            self._has_advantages = True
        return self._has_advantages

    def _batch_of(self, index: int) -> int:
        """Mini-batch of group number `index`."""
        return index * self._config.num_mini_batches // self._groups_per_step

    def _end_of(self, index: int) -> int:
        """Number of groups that complete mini-batches 0 to `index`."""
        return math.ceil((index + 1) * self._groups_per_step / self._config.num_mini_batches)

    def _too_few(self, batch: _MiniBatch) -> bool:
        num_tokens = sum(len(row.token_ids) for row in batch.waiting)
        return not num_tokens or num_tokens < self._config.min_tokens_per_micro_batch

    @property
    def _is_warming_up(self) -> bool:
        """True if the step trains the critic alone."""
        return self._critic is not None and self._critic.is_warming_up

    def _pass(self, batch: _MiniBatch, *, is_first: bool) -> None:
        if self._critic is not None and not self._critic.trains_with_policy:
            self._critic.run(batch.waiting)
        if not self._is_warming_up:
            batch.loss_sum += self._policy.run(
                batch.waiting, batch.shares, self._kl_coef, is_first=is_first
            )
        batch.waiting = []

    def _pass_again(self, batch: _MiniBatch) -> None:
        """Repeats a mini-batch without the tokens of servers that its passes found wrong."""
        self._leave_out_wrong(self._num_updated)
        self._policy.discard(batch.rows)
        if self._critic is not None:
            self._critic.discard()
        batch.loss_sum = 0.0
        batch.waiting = list(batch.rows)
        self._pass(batch, is_first=True)

    def _leave_out_wrong(self, first: int) -> None:
        """Removes the tokens of servers found wrong from mini-batch `first` and all after it."""
        quarantine = self._policy.sentinel.quarantine
        for index, group in enumerate(self._groups):
            if self._batch_of(index) >= first:
                self._groups[index] = without_wrong(group, quarantine, self._step)
        for batch in self._batches[first:]:
            batch.rows = [row for row in batch.rows if len(row.targets)]
            batch.waiting = [row for row in batch.waiting if len(row.targets)]
        if self._has_advantages:
            finish_advantages(self._groups, self._config)

    def _update(self, batch: _MiniBatch) -> None:
        """Applies the mini-batch's gradients; without rows nothing changes."""
        if not batch.rows:
            return
        if self._critic is not None:
            self._critic.update(batch.rows, is_last=not self.num_missing_groups)
        if not self._is_warming_up:
            is_more_to_come = self._num_updated + 1 < len(self._batches)
            count = row_count(batch.rows, self._config, batch.untrained)
            self._policy.update(batch.loss_sum, count, is_more_to_come=is_more_to_come)
        batch.loss_sum = 0.0

    def _metrics(self) -> Metrics:
        rows = [row for batch in self._batches for row in batch.rows]
        data = StepData(self._step + 1, self._groups, rows)
        metrics = self._policy.metrics() | data_metrics(data, self._config)
        if self._critic is not None:
            metrics |= self._critic.metrics(rows)
        if self._config.needs_reference:
            self._adapt(metrics["kl"])
            metrics["kl_coef"] = self._kl_coef
        for compute in self._own_metrics:
            metrics = compute(data) | metrics  # a number of ours keeps its value
        return metrics

    def _adapt(self, kl: float | None) -> None:
        """Steers the weight of the divergence for the next step."""
        config = self._config
        if config.target_kl and kl is not None:
            num_episodes = sum(len(group.rewards) for group in self._groups)
            self._kl_coef = adapted(
                self._kl_coef, kl, config.target_kl, num_episodes, config.kl_horizon
            )
