"""One forward and backward pass: unnormalised gradients of some rows and the sums behind metrics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_registry import Loss
from tailrace_learner.core.algorithms.aggregation import token_weights
from tailrace_learner.core.algorithms.corrections.base import corrected
from tailrace_learner.core.algorithms.kl import KL_ESTIMATORS
from tailrace_learner.core.algorithms.losses.base import BatchTokens, LossInputs, LossTerms
from tailrace_learner.core.algorithms.losses.spans import NO_SPANS, Spans
from tailrace_learner.core.algorithms.proximal import interpolated, interpolation_weights
from tailrace_learner.core.batch.packing import PackedBatch, micro_batches, pack
from tailrace_learner.core.batch.rows import Row, gathered
from tailrace_learner.core.mismatch.drift import add_errors
from tailrace_learner.core.model.policy import Policy, StartWeights
from tailrace_learner.core.step.tally import Tally, k3

ValueLoss = Callable[[PackedBatch, Tensor], Tensor]
Selection = Callable[[BatchTokens, LearnerConfig], NDArray[np.bool_]]


class PassRunner:
    """Runs passes of one loss; adds gradients to the policy's parameters, never divides them."""

    def __init__(self, policy: Policy, loss: Loss, config: LearnerConfig, start: StartWeights) -> None:
        self._policy = policy
        self._loss = loss
        self._config = config
        self._start = start
        self._interpolates = config.proximal_logprobs == "interpolate"

    def micro_batches(self, rows: Sequence[Row]) -> Iterator[list[Row]]:
        """Rows of one pass each."""
        limit = self._config.max_tokens_per_micro_batch
        return micro_batches(rows, limit, share_prefixes=self._config.shares_prefixes)

    def run(
        self,
        rows: Sequence[Row],
        tally: Tally,
        *,
        is_first: bool,
        kl_coef: float = 0.0,
        value_loss: ValueLoss | None = None,
    ) -> float:
        """Add the rows' gradients; returns their loss sum. `is_first`: in this step, of these rows.

        `kl_coef` weighs the divergence from the reference in the loss; `value_loss` gives the summed
        loss of a critic on the policy's hidden states [M, H], which the returned sum leaves out.
        """
        batch = pack(rows, self._policy.device, share_prefixes=self._config.shares_prefixes)
        log_pi_old = self._proximal(batch)
        log_pi, entropy, of_values = self._forward(batch, value_loss)
        inputs = self._inputs(batch, log_pi, log_pi_old)
        loss = self._loss_sum(batch, inputs, entropy, tally)
        if kl_coef:
            weights = self._token_weights(batch)
            loss = loss + kl_coef * (weights * self._divergence(batch, log_pi)).sum()
        (loss + of_values).backward()  # type: ignore[no-untyped-call]
        if is_first:
            self._measure(batch, inputs, entropy, tally)
            self._remember(batch, inputs.log_pi_old)
        return float(loss.detach())

    def idle(self, like: Row, *, is_first: bool) -> None:
        """Take part in a pass of other ranks without rows: all of it, on one token, for no gradient.

        `like`: one of the rows that they may be computing, so that the same forwards are done.
        """
        batch = pack([_shortest(like)], self._policy.device)
        if is_first:
            self._proximal(batch)
        log_pi, entropy = self._policy.forward(batch)
        (0.0 * (log_pi + entropy)).sum().backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def pick(self, selection: Selection, rows: Sequence[Row]) -> None:
        """Let `selection` choose among the tokens of a whole mini-batch, by the current weights.

        Every rank sees all rows here and keeps their log pi_old, for later epochs to choose alike.
        """
        packed: list[Row] = []
        log_pi: list[NDArray[np.float64]] = []
        log_pi_old: list[NDArray[np.float64]] = []
        for part in self.micro_batches(rows):
            batch = pack(part, self._policy.device, share_prefixes=self._config.shares_prefixes)
            inputs = self._inputs(batch, self._policy.forward(batch)[0], self._proximal(batch))
            packed += batch.rows
            self._remember(batch, inputs.log_pi_old)
            for found, values in ((log_pi, inputs.log_pi), (log_pi_old, inputs.log_pi_old)):
                found += np.split(values.double().cpu().numpy(), batch.target_offsets[1:-1])
        _pick(selection, packed, log_pi, log_pi_old, self._config)

    def _forward(
        self, batch: PackedBatch, value_loss: ValueLoss | None
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        if value_loss is None:
            return (*self._policy.forward(batch), 0.0)
        hidden = self._policy.hidden(batch)
        return (*self._policy.predict(hidden, batch), value_loss(batch, hidden))

    def _divergence(self, batch: PackedBatch, log_pi: Tensor) -> Tensor:
        """From the reference model, estimated at each target [M]."""
        estimate = KL_ESTIMATORS[self._config.kl_estimator]
        return estimate(log_pi, self._tensor(batch, lambda row: row.log_ref))

    def _inputs(self, batch: PackedBatch, log_pi: Tensor, log_pi_old: Tensor | None) -> LossInputs:
        log_mu = self._tensor(batch, lambda row: row.log_mu)
        if self._interpolates:
            ages = np.concatenate([row.staleness for row in batch.rows])
            alpha = torch.from_numpy(interpolation_weights(ages)).to(log_mu.device)
            log_pi_old = interpolated(log_pi, log_mu, alpha)
        is_picked = batch.rows[0].is_picked is not None
        return LossInputs(
            log_pi=log_pi,
            log_pi_old=log_pi.detach() if log_pi_old is None else log_pi_old,
            log_mu=log_mu,
            advantages=self._tensor(batch, lambda row: row.advantages),
            rows=Spans(np.diff(batch.target_offsets)),
            turns=_turns(batch.rows),
            is_picked=self._tensor(batch, lambda row: row.is_picked) if is_picked else None,
        )

    def _loss_sum(
        self, batch: PackedBatch, inputs: LossInputs, entropy: Tensor, tally: Tally
    ) -> Tensor:
        terms: LossTerms = self._loss(inputs, self._config)
        factor, counts = corrected(inputs, self._config)
        for name, count in (terms.counts | counts).items():
            tally.add(name, count, len(inputs.log_mu))
        per_token = factor * terms.per_token
        if self._config.entropy_loss_coef:
            per_token = per_token - self._config.entropy_loss_coef * entropy
        return (per_token * self._token_weights(batch)).sum()

    def _token_weights(self, batch: PackedBatch) -> Tensor:
        return token_weights(batch.rows, self._config).to(self._policy.device)

    @torch.no_grad()
    def _proximal(self, batch: PackedBatch) -> Tensor | None:
        """log pi_old [M]; None while the current weights are those of the step's start, or when it
        is interpolated.
        """
        if self._interpolates:
            return None
        if all(row.log_pi_old is not None for row in batch.rows):
            return self._tensor(batch, lambda row: row.log_pi_old)
        if not self._start.is_kept:
            return None
        with self._start.restored():
            return self._policy.forward(batch)[0]

    def _measure(self, batch: PackedBatch, inputs: LossInputs, entropy: Tensor, tally: Tally) -> None:
        num_tokens = len(inputs.log_mu)
        # Where pi_old is interpolated, only passes at the step's start are measured.
        start = inputs.log_pi.detach() if self._interpolates else inputs.log_pi_old
        current = np.concatenate([row.is_current for row in batch.rows])
        tally.add("behaviour_kl", k3(inputs.log_mu, start).sum(), num_tokens)
        add_errors(tally, batch.rows, inputs.log_mu, start, current, age=0)
        tally.add("entropy", entropy.sum(), num_tokens)
        if batch.rows[0].log_ref is not None:
            tally.add("kl", self._divergence(batch, start).sum(), num_tokens)

    def _remember(self, batch: PackedBatch, log_pi_old: Tensor) -> None:
        """Keep log pi_old on the rows when later epochs will want it."""
        if self._config.ppo_epochs == 1 or self._interpolates:
            return
        parts = np.split(log_pi_old.cpu().numpy(), batch.target_offsets[1:-1])
        for row, part in zip(batch.rows, parts, strict=True):
            row.log_pi_old = part

    def _tensor(self, batch: PackedBatch, of: Callable[[Row], NDArray[Any] | None]) -> Tensor:
        return gathered(batch.rows, of).to(self._policy.device)


def _shortest(row: Row) -> Row:
    """The row up to its first trained token."""
    return replace(
        row,
        token_ids=row.token_ids[: row.targets[0]],
        targets=row.targets[:1],
        target_ids=row.target_ids[:1],
        log_mu=row.log_mu[:1],
        log_pi_old=None if row.log_pi_old is None else row.log_pi_old[:1],
    )


def _turns(rows: Sequence[Row]) -> Spans:
    """Turns of all rows; empty where the loss does not look at them."""
    counts = [np.unique(row.turns, return_counts=True)[1] for row in rows if row.turns is not None]
    return Spans(np.concatenate(counts)) if counts else NO_SPANS


def _pick(
    selection: Selection,
    rows: Sequence[Row],
    log_pi: Sequence[NDArray[np.float64]],
    log_pi_old: Sequence[NDArray[np.float64]],
    config: LearnerConfig,
) -> None:
    """Writes `is_picked` into the rows of a mini-batch; log-probabilities [M] are one array per row.

    Tokens are in the order of their rows' names, and draws depend on a row's name alone: neither
    arrival nor packing changes what is picked.
    """
    order = sorted(range(len(rows)), key=lambda index: rows[index].row_id)
    tokens = BatchTokens(
        log_pi=np.concatenate([log_pi[index] for index in order]),
        log_pi_old=np.concatenate([log_pi_old[index] for index in order]),
        log_mu=np.concatenate([rows[index].log_mu for index in order]).astype(np.float64),
        advantages=np.concatenate([rows[index].advantages for index in order]).astype(np.float64),
        draws=np.concatenate([_draws(rows[index]) for index in order]),
    )
    picked = selection(tokens, config).astype(np.float32)
    ends = np.cumsum([len(rows[index].targets) for index in order])
    for index, part in zip(order, np.split(picked, ends[:-1]), strict=True):
        rows[index].is_picked = part


def _draws(row: Row) -> NDArray[np.float64]:
    digest = hashlib.blake2b(row.row_id.encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).random(len(row.targets))
