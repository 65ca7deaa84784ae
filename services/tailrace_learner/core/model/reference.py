"""The reference model: frozen weights that give the log-probabilities of another policy.

Over several ranks every rank has it whole, or it is cut over them; each rank asks it about the rows
that it trains. All ranks together gather one that is cut: a rank without rows left takes part in the
passes of the others with a token of its own. An offloaded one is in host memory and is copied to the
device for the rows of a pass, all at once.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.batch.packing import PackedBatch, pack
from tailrace_learner.core.batch.ranks import ONE_RANK
from tailrace_learner.core.batch.rows import TrainingRow, demonstration_row
from tailrace_learner.core.model.policy import PolicyModel, row_values
from tailrace_learner.ports import Ranks


class Reference:
    """A policy that is never trained. `holders`: the ranks that it is cut over, or just this one."""

    def __init__(
        self,
        policy: PolicyModel,
        config: LearnerConfig,
        *,
        offload: bool = False,
        holders: Ranks = ONE_RANK,
    ) -> None:
        self._policy = policy
        self._config = config
        self._holders = holders
        self._home = torch.device("cpu") if offload else policy.device
        policy.model.requires_grad_(False)
        if offload:
            policy.model.to(self._home)

    def fill(self, rows: Sequence[TrainingRow]) -> None:
        """Gives rows without `ref_logprobs` theirs (collective, where the reference is cut)."""
        missing = [row for row in rows if row.ref_logprobs is None]
        parts = list(self._policy.passes(missing, self._config))
        num_passes = max(self._holders.collect(len(parts)))
        if not num_passes:
            return
        with self.present():
            for row, ref_logprobs in row_values(self._policy, parts, self._ask, self._config):
                row.ref_logprobs = ref_logprobs
            for _ in range(len(parts), num_passes):
                self._idle()

    @contextmanager
    def present(self) -> Iterator[None]:
        """Puts the weights on the device, wherever they are kept."""
        if self._home == self._policy.device:
            yield
            return
        self._policy.model.to(self._policy.device)
        try:
            yield
        finally:
            self._policy.model.to(self._home)

    def _ask(self, batch: PackedBatch) -> Tensor:
        return self._policy.forward(batch)[0]

    @torch.no_grad()
    def _idle(self) -> None:
        row = demonstration_row("", np.zeros(2, np.int64), np.ones(2, np.uint8))
        assert row is not None
        self._ask(pack([row], self._policy.device))
