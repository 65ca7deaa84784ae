"""What a step already holds, without the tokens of servers found wrong since.

`core/batch/token_rows.py` leaves them out of groups that come later, by the same rule: a token stays if
it is no newer than its source's last good reading. Rows are changed in place: whoever computes a row
knows it by its identity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.core.batch.rows import PreparedGroup, Row
from tailrace_learner.core.mismatch.drift import per_token, spans_of

_PER_TARGET = (
    "targets",
    "target_ids",
    "log_mu",
    "advantages",
    "staleness",
    "is_current",
    "is_own",
    "log_pi_old",
    "turns",
    "is_picked",
    "log_ref",
    "values",
    "value_targets",
    "unsettled",
)


def without_wrong(group: PreparedGroup, quarantine: Mapping[str, int], step: int) -> PreparedGroup:
    """The group in step `step` without the tokens that `quarantine` means; they are counted.

    `quarantine`: source -> step of its last good reading. Rows without a token left are dropped.
    """
    num_tokens = sum(_leave_out(row, quarantine, step) for row in group.rows)
    counted = group.counts.get("num_quarantined_tokens", 0) + num_tokens
    return replace(
        group,
        rows=tuple(row for row in group.rows if len(row.targets)),
        counts=group.counts | {"num_quarantined_tokens": counted},
    )


def _leave_out(row: Row, quarantine: Mapping[str, int], step: int) -> int:
    """Number of the row's targets that were taken out of it."""
    if not any(span.source in quarantine for span in row.server_spans):
        return 0
    names: list[str] = []
    owners = per_token(row.server_spans, len(row.targets), names)
    stays = np.ones(len(owners), np.bool_)
    for owner, name in enumerate(names):
        if name in quarantine:
            stays[owners == owner] = step - row.staleness[owners == owner] <= quarantine[name]
    cut_down(row, stays)
    row.server_spans = spans_of(owners[stays], names)
    return int(np.count_nonzero(~stays))


def cut_down(row: Row, stays: NDArray[np.bool_]) -> None:
    """Leave of the row, in place, the targets [M] that stay; its `server_spans` are not cut."""
    for name in _PER_TARGET:
        if (values := getattr(row, name)) is not None:
            setattr(row, name, values[stays])
    if len(row.targets):
        row.token_ids = row.token_ids[: row.targets[-1]]
