"""The tokens that a loss treats differently, chosen over a whole mini-batch before its update.

The order of tokens is that of row names, and draws depend on a row's name alone: neither arrival nor
packing changes what is picked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.losses import BatchTokens, Selection
from tailrace_learner.core.batch.rows import Row


def pick(
    selection: Selection,
    rows: Sequence[Row],
    log_pi: Sequence[NDArray[np.float64]],
    log_pi_old: Sequence[NDArray[np.float64]],
    config: LearnerConfig,
) -> None:
    """Write `is_picked` into the rows of a mini-batch; log-probabilities [M] are one array per row."""
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
