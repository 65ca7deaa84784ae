"""Trains the policy on the mini-batches of a step: passes, updates, metrics.

Before an update every rank learns which servers the passes of all ranks found wrong (`judge`). Losses
are measured against the policy at the start of the step: its weights are kept as long as rows may
come that were not passed before the first update. Over several ranks each computes its share of a
mini-batch's rows, in the same number of passes.
"""

import math
from collections.abc import Sequence

import numpy as np

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.metrics import Metrics, mean
from tailrace_learner.core.batch.ranks import Shares
from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.mismatch.drift import DRIFT, correlation, of_sources
from tailrace_learner.core.mismatch.old_readings import OldReadings
from tailrace_learner.core.mismatch.sentinel import Sentinel
from tailrace_learner.core.model.policy import PolicyModel, StartWeights
from tailrace_learner.core.step.estimates import Roles
from tailrace_learner.core.step.metric_sums import MetricSums
from tailrace_learner.core.step.optimizer import learning_rate_at
from tailrace_learner.core.step.passes import CLAMPED, PassRunner, ValueLoss
from tailrace_learner.ports import Ranks, UpdateResult, WeightUpdater

_NONFINITE_REF = "num_nonfinite_ref_tokens"


class PolicyTrainer:
    """`begin` a step; `run`, `judge` and `update` mini-batches; `metrics` at the end."""

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: WeightUpdater,
        config: LearnerConfig,
        roles: Roles,
        ranks: Ranks,
        *,
        max_steps: int,
        num_old_versions: int = 0,
    ) -> None:
        self.start = StartWeights(policy.parameters)
        self._optimizer = optimizer
        self._config = config
        self._reference = roles.reference if config.needs_reference else None
        self._critic = roles.critic
        self._ranks = ranks
        self._max_steps = max_steps
        self._selection = config.policy_loss.selects
        self._interpolates = config.proximal_logprobs == "interpolate"
        self._passes = PassRunner(policy, config.policy_loss, config, self.start)
        self.sentinel = Sentinel(config.max_mismatch, config.min_mismatch_tokens)
        self._old = OldReadings(policy, config, ranks, num_old_versions)
        self.begin(0)

    def begin(self, step: int) -> None:
        """Starts a step with the weights as they are."""
        self._step = step
        self.sentinel.begin(step)
        self._sums = MetricSums()  # of the mini-batch
        self._done = MetricSums()  # of those before it
        self._losses: list[float] = []  # of all ranks
        self._updates: list[UpdateResult] = []
        self.start.forget()
        self._optimizer.zero_grad(set_to_none=True)

    @property
    def picks_tokens(self) -> bool:
        """True if the loss must see a whole mini-batch before its passes."""
        return self._selection is not None

    def run(
        self, rows: Sequence[TrainingRow], shares: Shares, kl_coef: float, *, is_first: bool
    ) -> float:
        """Adds the gradients of some rows of a mini-batch; returns the loss sum of this rank's share.

        `is_first`: in this step, of these rows.
        """
        if self._selection and rows:
            self._passes.pick(self._selection, rows)
        is_measured = is_first and not (self._interpolates and self._updates)
        loss_coef = kl_coef * (self._config.resolved_kl_in == "loss")
        parts = shares.passes(rows, self._ranks.rank, self._passes.micro_batches)
        self._fill_reference([row for part in parts for row in part], is_first=is_first)
        return sum(
            self._passes.run(
                part,
                self._sums,
                is_first=is_measured,
                kl_coef=loss_coef,
                value_loss=self._value_loss,
            )
            if part
            else self._passes.idle(rows[0], is_first=is_first)
            for part in parts
        )

    def _fill_reference(self, rows: Sequence[TrainingRow], *, is_first: bool) -> None:
        """Gives this rank's rows the reference's log-probabilities, where there is a reference."""
        if self._reference is None:
            return
        self._reference.fill(rows)
        if is_first:
            self._sums.add(_NONFINITE_REF, _num_nonfinite_ref(rows), 0)

    def judge(self, rows: Sequence[TrainingRow]) -> bool:
        """Reads servers' errors in a mini-batch's first passes (collective); True if one is wrong.

        It reads older tokens of its `rows` too as long as the step has applied nothing.
        """
        if not self._updates:
            self._old.read(rows, self._step, self.sentinel.num_owed, self._sums)
        drift = self._sums.split(DRIFT)
        found = MetricSums.of_all(self._ranks.collect(drift.totals()))
        return bool(self.sentinel.read(of_sources(found.totals())))

    def discard(self, rows: Sequence[TrainingRow]) -> None:
        """Drops all passes of a mini-batch that was not applied yet; `rows` are those left of it."""
        self._optimizer.zero_grad(set_to_none=True)
        self._sums = MetricSums()
        for row in rows:
            row.proximal_logprobs = None  # all ranks must compute it again, or none
            row.is_clamped = None

    def update(self, loss_sum: float, count: float, *, is_more_to_come: bool) -> None:
        """Applies a mini-batch's gradients, divided by `count`, unless its loss is not finite.

        `is_more_to_come`: rows that were not passed yet.
        """
        reads_start = not self._interpolates or (self._critic is not None and self._critic.reads_policy)
        if is_more_to_come and reads_start and not self.start.is_kept:
            self.start.keep()
        if not self._updates:
            self._old.keep(self._step)
        self._sums.split(DRIFT)  # of passes done again: they were read
        self._done.take(self._sums)
        self._sums = MetricSums()
        loss = self._ranks.sums([loss_sum])[0] / count
        self._losses.append(loss)
        self._updates.append(self._applied(count) if math.isfinite(loss) else self._skipped())

    def _applied(self, count: float) -> UpdateResult:
        return self._optimizer.update(
            count=count,
            learning_rate=self._learning_rate,
            max_grad_norm=self._config.training_args.max_grad_norm,
        )

    def _skipped(self) -> UpdateResult:
        """Drops the gradients: a clamp may have kept out of them what is in the loss."""
        self._optimizer.zero_grad(set_to_none=True)
        return UpdateResult(math.nan, False)

    def metrics(self) -> Metrics:
        """Metrics of all ranks, when the step is over."""
        if not self._updates:
            self._old.keep(self._step)
        found: Metrics = {"kl": None, "mismatch_kl": None, "behaviour_kl": None, "entropy": None}
        sums = MetricSums.of_all(self._ranks.collect(self._done.totals()))
        found["mismatch_correlation"] = correlation(sums)
        found |= sums.means()
        for name in (CLAMPED, *([_NONFINITE_REF] if self._reference is not None else [])):
            found[name] = sums.totals().get(name, (0.0, 0.0))[0]
        found |= self.sentinel.numbers()
        found["loss"] = mean(self._losses)
        found["grad_norm"] = mean([update.grad_norm for update in self._updates])
        found["num_updates"] = float(len(self._updates))
        found["num_skipped_updates"] = float(sum(not update.is_applied for update in self._updates))
        found["learning_rate"] = self._learning_rate
        return found

    @property
    def _learning_rate(self) -> float:
        return learning_rate_at(self._step, self._max_steps, self._config.training_args)

    @property
    def _value_loss(self) -> ValueLoss | None:
        """Value loss of a critic that is trained through the policy's own passes."""
        critic = self._critic
        return critic.loss if critic is not None and critic.trains_with_policy else None


def _num_nonfinite_ref(rows: Sequence[TrainingRow]) -> int:
    """Number of trained tokens to which the reference gives no finite log-probability."""
    return sum(
        int(np.count_nonzero(~np.isfinite(row.ref_logprobs)))
        for row in rows
        if row.ref_logprobs is not None
    )
