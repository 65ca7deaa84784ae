"""Tokens of an episode's row: which of them are trained, and their staleness.

Invariants: every trained token is a sampled one (loss mask 1) that follows another token, its
log-probability is finite, and it is at most `max_staleness` steps old. All others are counted. Tokens
that no policy of the run sampled (`GIVEN_VERSION`) are never stale and may have no log-probability.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tailrace.provenance import kept_spans
from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.batch.lineage import Ancestry
from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.mismatch.quarantine import is_trusted
from tailrace_protos.base import as_float32, as_int32, as_uint8
from tailrace_protos.generation import GIVEN_VERSION, TokenSpan
from tailrace_protos.trajectory import TokenRow


@dataclass(frozen=True, slots=True)
class TokenReader:
    """Reads rows for a learner of this ancestry that has done `step` steps; adds to `counts`."""

    config: LearnerConfig
    max_staleness: int
    ancestry: Ancestry
    step: int
    known_versions: Mapping[int, tuple[str, int]]  # policy_version -> (lineage, optimizer step)
    counts: Counter[str]
    # source -> last step of which its tokens are good
    quarantine: Mapping[str, int] = field(default_factory=dict)

    def trained(self, row_id: str, source: TokenRow) -> TrainingRow | None:
        """Row to train, its advantages still 0, or None when all of its tokens are masked."""
        places = np.flatnonzero(as_uint8(source.loss_mask))  # [S] of all sampled tokens
        staleness, is_own = self._ages(source.spans)
        logprobs = as_float32(source.inference_logprobs)
        is_missing = np.isnan(logprobs)[places] & _given(source.spans)
        finite = np.isfinite(logprobs)[places] | is_missing
        fresh = staleness <= self.max_staleness
        trusted = is_trusted(source.spans, staleness, self.quarantine, self.step)
        sampled = places > 0  # no token predicts the first one
        self.counts["num_nonfinite_tokens"] += int(np.count_nonzero(sampled & ~finite))
        self.counts["num_stale_tokens"] += int(np.count_nonzero(sampled & finite & ~fresh))
        usable = sampled & finite & fresh
        self.counts["num_quarantined_tokens"] += int(np.count_nonzero(usable & ~trusted))
        kept = usable & trusted
        return self._row(row_id, source, places, kept, staleness, is_own)

    def whole(self, row_id: str, source: TokenRow) -> TrainingRow | None:
        """Row with all sampled tokens as targets, trained or not; None if it has none.

        Their log-probabilities are as the engine reported them, finite or not.
        """
        places = np.flatnonzero(as_uint8(source.loss_mask))
        ages, own = np.zeros(len(places), np.int64), np.zeros(len(places), np.bool_)
        return self._row(row_id, source, places, places > 0, ages, own)

    def _ages(self, spans: Sequence[TokenSpan]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Staleness [S] of each sampled token, and True [S] where its weights are the learner's own."""
        versions = np.array([span.policy_version for span in spans], np.int64)
        staleness, is_own = self.ancestry.ages(versions, self.step, self.known_versions)
        staleness = np.where(versions == GIVEN_VERSION, 0, staleness)
        counts = np.array([span.num_tokens for span in spans], np.intp)
        return np.repeat(staleness, counts), np.repeat(is_own, counts)

    def _row(
        self,
        row_id: str,
        source: TokenRow,
        places: NDArray[np.int64],  # [S] of sampled tokens
        kept: NDArray[np.bool_],  # [S]
        staleness: NDArray[np.int64],  # [S]
        is_own: NDArray[np.bool_],  # [S]
    ) -> TrainingRow | None:
        targets = places[kept]
        if not len(targets):
            return None
        token_ids = as_int32(source.token_ids)
        return TrainingRow(
            row_id=row_id,
            token_ids=token_ids[: targets[-1]],
            targets=targets,
            target_ids=token_ids[targets],
            inference_logprobs=as_float32(source.inference_logprobs)[targets],
            advantages=np.zeros(len(targets), np.float32),
            staleness=staleness[kept],
            is_current=(is_own & (staleness == 0))[kept],
            is_own=is_own[kept],
            turns=self._turns(source, targets),
            spans=kept_spans(source.spans, kept),
        )

    def _turns(self, source: TokenRow, targets: NDArray[np.int64]) -> NDArray[np.int64] | None:
        if not self.config.policy_loss.reads_turns:
            return None
        return np.searchsorted(as_int32(source.turn_ends)[:-1], targets, side="right")


def _given(spans: Sequence[TokenSpan]) -> NDArray[np.bool_]:
    """True [S] for tokens that no policy of the run sampled."""
    flags = [span.policy_version == GIVEN_VERSION for span in spans]
    return np.repeat(np.array(flags, np.bool_), [span.num_tokens for span in spans])
