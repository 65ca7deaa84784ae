"""Readings of tokens that are older than the weights that a step begins with.

With episodes in flight while weights change, almost no token is of the version that its step begins
with. In every `EVERY_STEPS`th step a sample of those that are a step or a few older, of another age
each time, is computed once more, without gradient, under the weights of their version. Invariants:
the sample has at most `MAX_SHARE` of the tokens that the mini-batch computes, `MIN_TOKENS` or one
row, whichever is most. Every rank chooses the same rows and makes as many passes. The step's first
update drops the oldest weights, so nothing is read after it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.batch.packing import computed_tokens
from tailrace_learner.core.batch.ranks import Shares
from tailrace_learner.core.batch.rows import TrainingRow, gathered
from tailrace_learner.core.mismatch.drift import add_errors
from tailrace_learner.core.mismatch.old_sample import OldSample
from tailrace_learner.core.model.policy import PolicyModel, local
from tailrace_learner.core.step.metric_sums import MetricSums
from tailrace_learner.ports import Ranks

MAX_SHARE = 1 / 16
MIN_TOKENS = 256
EVERY_STEPS = 2


class OldReadings:
    """`read` before the first update of a step, `keep` when it comes."""

    def __init__(
        self, policy: PolicyModel, config: LearnerConfig, ranks: Ranks, num_versions: int
    ) -> None:
        self._policy = policy
        self._config = config
        self._ranks = ranks
        self._num_versions = num_versions
        self._last_read: dict[str, int] = {}  # by source
        self._next_step = 0  # in which a sample is read
        self._num_samples = 0
        self._versions = _OldVersions(policy.parameters if num_versions else [], num_versions)

    def keep(self, step: int) -> None:
        """Keeps the current weights, those that `step` begins with, before they change."""
        self._versions.keep(step)

    def read(
        self, rows: Sequence[TrainingRow], step: int, num_owed: Callable[[str], int], sums: MetricSums
    ) -> None:
        """Adds to `sums` the errors of sources on a sample of older tokens of one age.

        `num_owed`: number of a source's tokens that are still needed, those of `step` itself
        included.
        """
        ages = [age for age in range(1, self._num_versions + 1) if self._versions.has(step - age)]
        if not ages or not rows or step < self._next_step:
            return
        sample = OldSample(rows, num_owed, self._max_tokens(rows), self._last_read, step)
        turn = self._num_samples % len(ages)
        for age in ages[turn:] + ages[:turn]:
            if chosen := sample.of_age(age):
                with self._versions.restored(step - age):
                    self._compute(chosen, age, sums)
                self._next_step = step + EVERY_STEPS
                self._num_samples += 1
                return

    def _max_tokens(self, rows: Sequence[TrainingRow]) -> float:
        computed = computed_tokens(rows, share_prefixes=self._policy.shares_prefixes(self._config))
        return max(MAX_SHARE * computed, MIN_TOKENS)

    @torch.no_grad()
    def _compute(self, rows: Sequence[TrainingRow], age: int, sums: MetricSums) -> None:
        for part in Shares(self._ranks.num_ranks).passes(rows, self._ranks.rank, self._cut):
            # Without rows: sharded weights are gathered by all ranks together.
            batch = self._policy.pack(part or [rows[0]], self._config)
            learner_logprobs = self._policy.forward(batch)[0]
            if part:
                given_logprobs = gathered(batch.rows, lambda row: row.inference_logprobs)
                inference_logprobs = given_logprobs.to(learner_logprobs.device)
                counted = np.ones(len(learner_logprobs), np.bool_)
                add_errors(sums, batch.rows, inference_logprobs, learner_logprobs, counted, age)

    def _cut(self, rows: Sequence[TrainingRow]) -> Iterator[list[TrainingRow]]:
        return self._policy.passes(rows, self._config)


class _OldVersions:
    """Weights that the last steps began with, by step, for forwards under them.

    Each rank keeps its own shards on the host in their own precision: `num_versions` times what the
    trained weights (of adapters: only these) take on this rank. A forward under them exchanges them
    with the model's, one tensor after the other, so the device needs room for one more tensor.
    """

    def __init__(self, parameters: list[nn.Parameter], num_versions: int) -> None:
        self._parameters = parameters
        self._num_versions = num_versions
        self._kept: dict[int, list[Tensor]] = {}  # by step

    def has(self, step: int) -> bool:
        """Tells whether the weights of `step` are kept."""
        return step in self._kept

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Copies the current weights, those of `step`, into the memory of the oldest copy."""
        if not self._num_versions or step in self._kept:
            return
        if len(self._kept) < self._num_versions:
            copies = [_on_host(shard) for shard in self._shards()]
        else:
            copies = self._kept.pop(min(self._kept))
        for copy, shard in zip(copies, self._shards(), strict=True):
            copy.copy_(shard)
        self._kept[step] = copies

    @contextmanager
    def restored(self, step: int) -> Iterator[None]:
        """Puts the weights of `step` into the model, for forwards without gradient."""
        self._exchange(step)
        try:
            yield
        finally:
            self._exchange(step)

    @torch.no_grad()
    def _exchange(self, step: int) -> None:
        for copy, shard in zip(self._kept[step], self._shards(), strict=True):
            # In place: code that gathers a shard, or has a view of a weight, reads its memory.
            now = shard.clone()
            shard.copy_(copy)
            copy.copy_(now)

    def _shards(self) -> Iterator[Tensor]:
        return (local(parameter).detach() for parameter in self._parameters)


def _on_host(shard: Tensor) -> Tensor:
    """Allocates memory for a copy; pinned for a CUDA tensor, which copies several times as fast."""
    return torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=shard.is_cuda)
