"""The tokens of an episode's row: which of them are trained, and how stale they are.

Invariants: every trained token is a sampled one (loss mask 1) that something predicts, its
log-probability is finite, and it is at most `max_staleness` steps old. Whatever is left out is counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.batch.lineage import Ancestry
from tailrace_learner.core.batch.rows import Row
from tailrace_learner.core.mismatch.drift import per_token, spans_of
from tailrace_protos.base import as_float32, as_int32, as_uint8
from tailrace_protos.trajectory import ServerSpan, TokenRow

TURN_LOSSES = frozenset({"segment"})


@dataclass(frozen=True, slots=True)
class TokenReader:
    """Reads rows for a learner of this ancestry that has done `step` steps; adds to `counts`."""

    config: LearnerConfig
    max_staleness: int
    ancestry: Ancestry
    step: int
    book: Mapping[int, tuple[str, int]]  # policy_version -> (lineage, optimizer step)
    counts: Counter[str]
    # source -> last step of which its tokens are good
    quarantine: Mapping[str, int] = field(default_factory=dict)

    def trained(self, row_id: str, source: TokenRow) -> Row | None:
        """The row to train, its advantages still 0, or None when all of its tokens are masked."""
        log_mu = as_float32(source.inference_logprobs)
        sampled = _sampled(source)
        staleness, is_own = self.ancestry.ages(as_int32(source.policy_versions), self.step, self.book)
        finite = np.isfinite(log_mu)
        fresh = staleness <= self.max_staleness
        trusted = self._trusted(source, staleness)
        self.counts["num_nonfinite_tokens"] += int(np.count_nonzero(sampled & ~finite))
        self.counts["num_stale_tokens"] += int(np.count_nonzero(sampled & finite & ~fresh))
        usable = sampled & finite & fresh
        self.counts["num_quarantined_tokens"] += int(np.count_nonzero(usable & ~trusted))
        targets = np.flatnonzero(usable & trusted)
        return self._row(row_id, source, targets, log_mu, staleness, is_own)

    def whole(self, row_id: str, source: TokenRow) -> Row | None:
        """The row with all sampled tokens as targets, trained or not; None if it has none.

        Their log-probabilities are as the engine reported them, finite or not.
        """
        log_mu = as_float32(source.inference_logprobs)
        ages, own = np.zeros(len(log_mu), np.int64), np.zeros(len(log_mu), np.bool_)
        return self._row(row_id, source, np.flatnonzero(_sampled(source)), log_mu, ages, own)

    def _row(
        self,
        row_id: str,
        source: TokenRow,
        targets: NDArray[np.int64],
        log_mu: NDArray[np.float32],
        staleness: NDArray[np.int64],
        is_own: NDArray[np.bool_],
    ) -> Row | None:
        if not len(targets):
            return None
        token_ids = as_int32(source.token_ids).astype(np.int64)
        return Row(
            row_id=row_id,
            token_ids=token_ids[: targets[-1]],
            targets=targets,
            target_ids=token_ids[targets],
            log_mu=log_mu[targets],
            advantages=np.zeros(len(targets), np.float32),
            staleness=staleness[targets],
            is_current=(is_own & (staleness == 0))[targets],
            is_own=is_own[targets],
            turns=self._turns(source, targets),
            server_spans=_spans_of(source, targets),
        )

    def _trusted(self, source: TokenRow, staleness: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Where no token of a quarantined server stands that is newer than its last good reading."""
        trusted = np.ones(len(staleness), np.bool_)
        if not any(span.source in self.quarantine for span in source.server_spans):
            return trusted
        names: list[str] = []
        places = np.flatnonzero(as_uint8(source.loss_mask))
        owners = per_token(source.server_spans, len(places), names)
        for owner, name in enumerate(names):
            if name in self.quarantine:
                mine = places[owners == owner]
                trusted[mine] = self.step - staleness[mine] <= self.quarantine[name]
        return trusted

    def _turns(self, source: TokenRow, targets: NDArray[np.int64]) -> NDArray[np.int64] | None:
        if self.config.loss not in TURN_LOSSES:
            return None
        return np.searchsorted(as_int32(source.turn_ends)[:-1], targets, side="right")


def _spans_of(source: TokenRow, targets: NDArray[np.int64]) -> tuple[ServerSpan, ...]:
    """The sources of the targets alone."""
    spans = source.server_spans
    if not spans:
        return ()
    if len(spans) == 1:
        return (ServerSpan(spans[0].source, len(targets)),)
    names: list[str] = []
    places = np.flatnonzero(as_uint8(source.loss_mask))
    owners = per_token(spans, len(places), names)[np.isin(places, targets)]
    return spans_of(owners, names)


def _sampled(source: TokenRow) -> NDArray[np.bool_]:
    sampled: NDArray[np.bool_] = as_uint8(source.loss_mask) != 0
    sampled[:1] = False  # nothing predicts the first token
    return sampled
