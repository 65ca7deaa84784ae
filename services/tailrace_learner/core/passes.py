"""One forward and backward pass: unnormalised gradients of some rows and the sums behind metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.aggregation import AGGREGATIONS
from tailrace_learner.core.correction import CORRECTIONS
from tailrace_learner.core.losses import Loss, LossInputs
from tailrace_learner.core.packing import PackedBatch, pack
from tailrace_learner.core.policy import Policy, StartWeights
from tailrace_learner.core.rows import Row
from tailrace_learner.core.tally import Tally, k3


def row_count(rows: Sequence[Row], config: LearnerConfig) -> float:
    """What the rows add to the number that their gradients are divided by."""
    share = AGGREGATIONS[config.loss_aggregation]
    return sum(share(len(row.targets), config).divisor for row in rows)


class PassRunner:
    """Runs passes of one loss; adds gradients to the policy's parameters, never divides them."""

    def __init__(self, policy: Policy, loss: Loss, config: LearnerConfig, start: StartWeights) -> None:
        self._policy = policy
        self._loss = loss
        self._config = config
        self._start = start

    def run(self, rows: Sequence[Row], tally: Tally, *, is_first: bool) -> float:
        """Add the rows' gradients; returns their loss sum. `is_first`: in this step, of these rows."""
        batch = pack(rows, self._policy.device)
        log_pi_old = self._proximal(batch)
        log_pi, entropy = self._policy.forward(batch)
        inputs = LossInputs(
            log_pi=log_pi,
            log_pi_old=log_pi.detach() if log_pi_old is None else log_pi_old,
            log_mu=self._tensor(batch, lambda row: row.log_mu),
            advantages=self._tensor(batch, lambda row: row.advantages),
        )
        loss = self._loss_sum(batch, inputs, entropy, tally)
        loss.backward()  # type: ignore[no-untyped-call]
        if is_first:
            self._measure(batch, inputs, entropy, tally)
            self._remember(batch, inputs.log_pi_old)
        return float(loss.detach())

    def _loss_sum(
        self, batch: PackedBatch, inputs: LossInputs, entropy: Tensor, tally: Tally
    ) -> Tensor:
        terms = self._loss(inputs, self._config)
        factor, counts = CORRECTIONS[self._config.behaviour_correction](inputs, self._config)
        for name, count in (terms.counts | counts).items():
            tally.add(name, count, len(inputs.log_mu))
        per_token = factor * terms.per_token
        if self._config.entropy_loss_coef:
            per_token = per_token - self._config.entropy_loss_coef * entropy
        return (per_token * self._token_weights(batch)).sum()

    def _token_weights(self, batch: PackedBatch) -> Tensor:
        share = AGGREGATIONS[self._config.loss_aggregation]
        lengths = [len(row.targets) for row in batch.rows]
        weights = [share(length, self._config).token_weight for length in lengths]
        return torch.from_numpy(np.repeat(weights, lengths).astype(np.float32)).to(self._policy.device)

    @torch.no_grad()
    def _proximal(self, batch: PackedBatch) -> Tensor | None:
        """log pi_old [M]; None while the current weights are those of the step's start."""
        if all(row.log_pi_old is not None for row in batch.rows):
            return self._tensor(batch, lambda row: row.log_pi_old)
        if not self._start.is_kept:
            return None
        with self._start.restored():
            return self._policy.forward(batch)[0]

    def _measure(self, batch: PackedBatch, inputs: LossInputs, entropy: Tensor, tally: Tally) -> None:
        num_tokens = len(inputs.log_mu)
        divergence = k3(inputs.log_mu, inputs.log_pi_old)
        current = np.concatenate([row.is_current for row in batch.rows])
        on_own = torch.from_numpy(current).to(divergence.device)
        tally.add("behaviour_kl", divergence.sum(), num_tokens)
        tally.add("mismatch_kl", divergence[on_own].sum(), int(current.sum()))
        tally.add("entropy", entropy.sum(), num_tokens)

    def _remember(self, batch: PackedBatch, log_pi_old: Tensor) -> None:
        """Keep log pi_old on the rows when later epochs will want it."""
        if self._config.ppo_epochs == 1:
            return
        parts = np.split(log_pi_old.cpu().numpy(), batch.target_offsets[1:-1])
        for row, part in zip(batch.rows, parts, strict=True):
            row.log_pi_old = part

    def _tensor(self, batch: PackedBatch, of: Callable[[Row], NDArray[np.float32] | None]) -> Tensor:
        parts = [part for row in batch.rows if (part := of(row)) is not None]
        return torch.from_numpy(np.concatenate(parts)).to(self._policy.device)
