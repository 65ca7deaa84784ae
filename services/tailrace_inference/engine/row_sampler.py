"""Next tokens of rows: from logits to sent chunks and ended calls.

Invariants: a guide's matcher sees each token of its call once, before the next is sampled; a row whose
call has ended is freed at once.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tailrace_inference.engine.batch import Batch
from tailrace_inference.engine.emitter import Emitter
from tailrace_inference.engine.kv_cache import Int64Array
from tailrace_inference.engine.sampling import choose, scaled_logprobs
from tailrace_protos.generation import FinishReason


class RowSampler:
    """Samples for the rows of one batch. `free` gives the row of an ended call back."""

    def __init__(self, batch: Batch, emitter: Emitter, free: Callable[[int], None]) -> None:
        self._batch = batch
        self._emitter = emitter
        self._free = free

    def take(self, rows: Int64Array, logits: Tensor, policy_version: int) -> None:
        """Appends a token to each of `rows` [n], from `logits` [n, vocabulary]; ends full calls."""
        batch = self._batch
        if batch.num_guided:
            logits = self._guide(rows, logits)
        sampling = batch.sampling_rows(rows)
        logprobs = scaled_logprobs(logits, sampling)
        tokens, chosen = choose(logprobs, sampling)
        if batch.num_asking:
            self._put_top_logprobs(rows, logprobs)
        batch.append(rows, tokens.cpu().numpy(), chosen.cpu().numpy())
        for row, reason, stop_matched in self._emitter.ended(rows):
            self.finish(row, policy_version, reason, stop_matched)
        if batch.num_guided:
            self._follow_guides(rows, policy_version)

    def finish(
        self,
        row: int,
        policy_version: int,
        reason: FinishReason,
        stop_matched: int | str | None = None,
    ) -> None:
        """Sends the last chunk of a row and frees it."""
        self._emitter.close(row, policy_version, reason, stop_matched)
        self._free(row)

    def _guide(self, rows: Int64Array, logits: Tensor) -> Tensor:
        """`logits` [n, vocabulary] of `rows` [n] with -inf where a guide forbids a token."""
        guided = np.flatnonzero(self._batch.is_guided[rows])
        if not len(guided):
            return logits
        calls = (self._batch.call(int(row)) for row in rows[guided])
        allowed = np.stack([call.guide.allowed for call in calls if call.guide is not None])
        index = torch.from_numpy(guided).to(logits.device)
        forbidden = torch.from_numpy(~allowed).to(logits.device)
        bound = logits.index_select(0, index).masked_fill(forbidden, -torch.inf)
        return logits.index_copy(0, index, bound)

    def _follow_guides(self, rows: Int64Array, policy_version: int) -> None:
        """Lets the guides of those of `rows` [n] that go on take their newest token."""
        batch = self._batch
        for row in rows[batch.is_guided[rows]].tolist():  # none that has ended
            guide = batch.call(row).guide
            assert guide is not None
            taken = guide.consume(int(batch.tokens[row, batch.length[row] - 1]))
            if not taken or not guide.allowed.any():
                self._emitter.flush(np.array([row]), policy_version, time.perf_counter())
                self._emitter.fail(row, "guide: no token of this vocabulary goes on with the reply")
                self._free(row)

    def _put_top_logprobs(self, rows: Int64Array, logprobs: Tensor) -> None:
        """Stores the likeliest tokens of `logprobs` [n, vocabulary] for `rows` [n] that ask."""
        batch = self._batch
        asking = np.flatnonzero(batch.num_top_logprobs[rows])
        if len(asking):
            width = int(batch.num_top_logprobs[rows].max())
            chosen = torch.from_numpy(asking).to(logprobs.device)
            tops = logprobs.index_select(0, chosen).topk(width, dim=-1)
            batch.put_top_logprobs(rows[asking], tops.indices.cpu().numpy(), tops.values.cpu().numpy())
