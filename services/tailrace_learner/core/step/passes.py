"""One forward and backward pass: unnormalised gradients of some rows and the sums behind metrics."""

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
from tailrace_learner.core.algorithms.corrections import corrected
from tailrace_learner.core.algorithms.kl import KL_ESTIMATORS
from tailrace_learner.core.algorithms.losses.base import BatchTokens, LossInputs, LossTerms
from tailrace_learner.core.algorithms.losses.spans import NO_SPANS, Spans
from tailrace_learner.core.algorithms.proximal import interpolated, interpolation_weights
from tailrace_learner.core.algorithms.ratios import REACH, is_beyond
from tailrace_learner.core.batch.packing import PackedBatch, pack
from tailrace_learner.core.batch.rows import TrainingRow, gathered
from tailrace_learner.core.mismatch.drift import add_errors
from tailrace_learner.core.model.policy import PolicyModel, StartWeights
from tailrace_learner.core.step.metric_sums import MetricSums, k3

ValueLoss = Callable[[PackedBatch, Tensor], Tensor]
Selection = Callable[[BatchTokens, LearnerConfig], NDArray[np.bool_]]
CLAMPED = "num_clamped_tokens"


class PassRunner:
    """Runs passes of one loss; adds gradients to the policy's parameters, never divides them."""

    def __init__(
        self, policy: PolicyModel, loss: Loss, config: LearnerConfig, start: StartWeights
    ) -> None:
        self._policy = policy
        self._loss = loss
        self._config = config
        self._start = start
        self._interpolates = config.proximal_logprobs == "interpolate"

    def micro_batches(self, rows: Sequence[TrainingRow]) -> Iterator[list[TrainingRow]]:
        """Rows of one pass each."""
        return self._policy.passes(rows, self._config)

    def run(
        self,
        rows: Sequence[TrainingRow],
        sums: MetricSums,
        *,
        is_first: bool,
        kl_coef: float = 0.0,
        value_loss: ValueLoss | None = None,
    ) -> float:
        """Adds the rows' gradients; returns their loss sum. `is_first`: in this step, of these rows.

        `kl_coef` weighs the divergence from the reference in the loss. `value_loss` gives the summed
        loss of a critic on the policy's hidden states [M, H], which the returned sum leaves out.
        """
        batch = self._policy.pack(rows, self._config)
        proximal_logprobs = self._proximal(batch)
        learner_logprobs, entropy, of_values = self._forward(batch, value_loss)
        inputs = self._inputs(batch, learner_logprobs, proximal_logprobs)
        loss = self._loss_sum(batch, inputs, entropy, sums)
        if kl_coef:
            weights = self._token_weights(batch)
            loss = loss + kl_coef * (weights * self._divergence(batch, learner_logprobs)).sum()
        (loss + of_values).backward()  # type: ignore[no-untyped-call]
        if is_first:
            self._measure(batch, inputs, entropy, sums)
            self._remember(batch, inputs.proximal_logprobs)
        sums.add(CLAMPED, self._num_clamped(batch, inputs), 0)
        return float(loss.detach())

    def idle(self, like: TrainingRow, *, is_first: bool) -> float:
        """Takes part in a pass of other ranks without rows: on one token, without gradient; returns 0.

        `like`: one of the rows that they may be computing, so that the same forwards are done.
        """
        batch = pack([_shortest(like)], self._policy.device)
        if is_first:
            self._proximal(batch)
        learner_logprobs, entropy = self._policy.forward(batch)
        (0.0 * (learner_logprobs + entropy)).sum().backward()  # type: ignore[no-untyped-call]
        return 0.0

    @torch.no_grad()
    def pick(self, selection: Selection, rows: Sequence[TrainingRow]) -> None:
        """Lets `selection` choose among the tokens of a whole mini-batch, by the current weights.

        Every rank sees all rows here and keeps their proximal log-probabilities, so that later epochs
        choose alike.
        """
        packed: list[TrainingRow] = []
        found: tuple[list[NDArray[np.float64]], ...] = ([], [], [])  # of LossInputs, one array per row
        for part in self.micro_batches(rows):
            batch = self._policy.pack(part, self._config)
            inputs = self._inputs(batch, self._policy.forward(batch)[0], self._proximal(batch))
            packed += batch.rows
            self._remember(batch, inputs.proximal_logprobs)
            given = inputs.learner_logprobs, inputs.proximal_logprobs, inputs.inference_logprobs
            for parts, values in zip(found, given, strict=True):
                parts += np.split(values.double().cpu().numpy(), batch.target_offsets[1:-1])
        _pick(selection, packed, found, self._config)

    def _forward(
        self, batch: PackedBatch, value_loss: ValueLoss | None
    ) -> tuple[Tensor, Tensor, Tensor | float]:
        if value_loss is None:
            return (*self._policy.forward(batch), 0.0)
        hidden = self._policy.hidden(batch)
        return (*self._policy.predict(hidden, batch), value_loss(batch, hidden))

    def _divergence(self, batch: PackedBatch, learner_logprobs: Tensor) -> Tensor:
        """Divergence from the reference model, estimated at each target [M]."""
        estimate = KL_ESTIMATORS[self._config.kl_estimator]
        return estimate(learner_logprobs, self._tensor(batch, lambda row: row.ref_logprobs))

    def _inputs(
        self, batch: PackedBatch, learner_logprobs: Tensor, proximal_logprobs: Tensor | None
    ) -> LossInputs:
        known = learner_logprobs.detach() if proximal_logprobs is None else proximal_logprobs
        inference_logprobs = self._tensor(batch, lambda row: row.inference_logprobs)
        kind = torch.result_type(inference_logprobs, learner_logprobs)
        inference_logprobs = inference_logprobs.to(kind)  # no copy of float32; filled in place
        # Tokens without a log-probability count as sampled by the step's start weights.
        is_missing = inference_logprobs.isnan()
        torch.where(is_missing, known, inference_logprobs, out=inference_logprobs)
        if self._interpolates:
            ages = np.concatenate([row.staleness for row in batch.rows])
            alpha = torch.from_numpy(interpolation_weights(ages)).to(inference_logprobs.device)
            proximal_logprobs = interpolated(learner_logprobs, inference_logprobs, alpha)
        start = learner_logprobs.detach()
        if proximal_logprobs is not None:
            start = proximal_logprobs.maximum(start - REACH)
        is_picked = batch.rows[0].is_picked is not None
        return LossInputs(
            learner_logprobs=learner_logprobs,
            proximal_logprobs=start,
            inference_logprobs=inference_logprobs.clamp_(min=start - REACH),  # of users' losses too
            advantages=self._tensor(batch, lambda row: row.advantages),
            rows=Spans(np.diff(batch.target_offsets)),
            turns=_turns(batch.rows),
            is_picked=self._tensor(batch, lambda row: row.is_picked) if is_picked else None,
        )

    def _loss_sum(
        self, batch: PackedBatch, inputs: LossInputs, entropy: Tensor, sums: MetricSums
    ) -> Tensor:
        terms = self._loss(inputs, self._config)
        if not isinstance(terms, LossTerms):
            raise TypeError(
                f"learner.loss {self._config.loss!r} returned {type(terms).__name__}: let it return "
                "LossTerms(per_token, counts)"
            )
        factor, counts = corrected(inputs, self._config)
        for name, count in (terms.counts | counts).items():
            sums.add(name, count, len(inputs.inference_logprobs))
        per_token = factor * terms.per_token
        if self._config.entropy_loss_coef:
            per_token = per_token - self._config.entropy_loss_coef * entropy
        return (per_token * self._token_weights(batch)).sum()

    def _token_weights(self, batch: PackedBatch) -> Tensor:
        return token_weights(batch.rows, self._config).to(self._policy.device)

    @torch.no_grad()
    def _proximal(self, batch: PackedBatch) -> Tensor | None:
        """Proximal log-probabilities [M]; None for the step's start weights, or when interpolated."""
        if self._interpolates:
            return None
        if all(row.proximal_logprobs is not None for row in batch.rows):
            return self._tensor(batch, lambda row: row.proximal_logprobs)
        if not self._start.is_kept:
            return None
        with self._start.restored():
            return self._policy.forward(batch)[0]

    def _measure(
        self, batch: PackedBatch, inputs: LossInputs, entropy: Tensor, sums: MetricSums
    ) -> None:
        num_tokens = len(inputs.inference_logprobs)
        # Where pi_old is interpolated, only passes at the step's start are measured.
        start = inputs.learner_logprobs.detach() if self._interpolates else inputs.proximal_logprobs
        current = np.concatenate([row.is_current for row in batch.rows])
        sums.add("behaviour_kl", k3(inputs.inference_logprobs, start).sum(), num_tokens)
        add_errors(sums, batch.rows, inputs.inference_logprobs, start, current, age=0)
        sums.add("entropy", entropy.sum(), num_tokens)
        if batch.rows[0].ref_logprobs is not None:
            sums.add("kl", self._divergence(batch, start).sum(), num_tokens)

    @torch.no_grad()
    def _num_clamped(self, batch: PackedBatch, inputs: LossInputs) -> int:
        """Number of tokens with a log-ratio beyond the bound that had none in the step before."""
        current, start = inputs.learner_logprobs, inputs.proximal_logprobs
        pairs = [(current, start), (start, inputs.inference_logprobs)]
        pairs += [(current, inputs.inference_logprobs)] if self._loss.off_policy else []
        if batch.rows[0].ref_logprobs is not None:
            pairs.append((current, self._tensor(batch, lambda row: row.ref_logprobs)))
        flags = torch.stack([is_beyond(*pair) for pair in pairs]).any(0).cpu().numpy()
        if not flags.any():
            return 0
        num_new = 0
        for row, part in zip(batch.rows, np.split(flags, batch.target_offsets[1:-1]), strict=True):
            known = np.zeros_like(part) if row.is_clamped is None else row.is_clamped
            num_new += int(np.count_nonzero(part & ~known))
            row.is_clamped = part | known
        return num_new

    def _remember(self, batch: PackedBatch, proximal_logprobs: Tensor) -> None:
        """Keeps proximal log-probabilities on the rows when later epochs need them."""
        if self._config.ppo_epochs == 1 or self._interpolates:
            return
        parts = np.split(proximal_logprobs.cpu().numpy(), batch.target_offsets[1:-1])
        for row, part in zip(batch.rows, parts, strict=True):
            row.proximal_logprobs = part

    def _tensor(self, batch: PackedBatch, of: Callable[[TrainingRow], NDArray[Any] | None]) -> Tensor:
        return gathered(batch.rows, of).to(self._policy.device)


def _shortest(row: TrainingRow) -> TrainingRow:
    """Row up to its first trained token."""
    return replace(
        row,
        token_ids=row.token_ids[: row.targets[0]],
        targets=row.targets[:1],
        target_ids=row.target_ids[:1],
        inference_logprobs=row.inference_logprobs[:1],
        proximal_logprobs=None if row.proximal_logprobs is None else row.proximal_logprobs[:1],
    )


def _turns(rows: Sequence[TrainingRow]) -> Spans:
    """Turns of all rows; empty where the loss does not read them."""
    counts = [np.unique(row.turns, return_counts=True)[1] for row in rows if row.turns is not None]
    return Spans(np.concatenate(counts)) if counts else NO_SPANS


def _pick(
    selection: Selection,
    rows: Sequence[TrainingRow],
    logprobs: Sequence[Sequence[NDArray[np.float64]]],
    config: LearnerConfig,
) -> None:
    """Writes `is_picked` into the rows of a mini-batch.

    `logprobs` are those of current, proximal and sampling policy, each one array [M] per row.
    Tokens are in the order of their rows' names, and draws depend on a row's name alone: neither
    arrival nor packing changes what is picked.
    """
    order = sorted(range(len(rows)), key=lambda index: rows[index].row_id)
    current, start, sampled = (np.concatenate([parts[index] for index in order]) for parts in logprobs)
    tokens = BatchTokens(
        current,
        start,
        sampled,
        advantages=np.concatenate([rows[index].advantages for index in order]).astype(np.float64),
        draws=np.concatenate([_draws(rows[index]) for index in order]),
    )
    picked = selection(tokens, config).astype(np.float32)
    ends = np.cumsum([len(rows[index].targets) for index in order])
    for index, part in zip(order, np.split(picked, ends[:-1]), strict=True):
        rows[index].is_picked = part


def _draws(row: TrainingRow) -> NDArray[np.float64]:
    digest = hashlib.blake2b(row.row_id.encode(), digest_size=8).digest()
    return np.random.default_rng(int.from_bytes(digest, "little")).random(len(row.targets))
