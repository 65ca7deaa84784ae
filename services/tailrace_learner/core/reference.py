"""The reference model: frozen weights that say how likely tokens were to another policy.

Over several ranks every rank has it whole, and asks it about the rows that it trains. An offloaded one
lives in host memory and visits the device for the rows of a pass, all at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.policy import Policy
from tailrace_learner.core.row_values import row_values
from tailrace_learner.core.rows import Row


class Reference:
    """A policy that is never trained."""

    def __init__(self, policy: Policy, config: LearnerConfig, *, offload: bool = False) -> None:
        self._policy = policy
        self._config = config
        self._home = torch.device("cpu") if offload else policy.device
        policy.model.requires_grad_(False)
        policy.model.to(self._home)

    def fill(self, rows: Sequence[Row]) -> None:
        """Give the rows that lack it their `log_ref`."""
        lacking = [row for row in rows if row.log_ref is None]
        if not lacking:
            return
        policy = self._policy
        with self.present():
            answers = row_values(
                lacking, lambda batch: policy.forward(batch)[0], policy.device, self._config
            )
            for row, log_ref in answers:
                row.log_ref = log_ref

    @contextmanager
    def present(self) -> Iterator[None]:
        """The weights on the device, whatever their home."""
        if self._home == self._policy.device:
            yield
            return
        self._policy.model.to(self._policy.device)
        try:
            yield
        finally:
            self._policy.model.to(self._home)
