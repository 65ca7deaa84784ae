"""Quarantine within a step: removes the tokens of servers that its passes found wrong.

`core/batch/token_rows.py` leaves them out of later groups by the same rule: a token stays if it is no
newer than its source's last good reading. Rows are changed in place, because passes know a row by its
identity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np
from numpy.typing import NDArray

from tailrace.provenance import kept_spans
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow
from tailrace_protos.control import free_source
from tailrace_protos.generation import TokenSpan

_OF_THE_ROW = {"row_id", "token_ids", "spans", "conversation"}
_PER_TARGET = [field.name for field in fields(TrainingRow) if field.name not in _OF_THE_ROW]


def without_wrong(group: PreparedGroup, quarantine: Mapping[str, int], step: int) -> PreparedGroup:
    """Group of step `step` without the tokens that `quarantine` excludes; they are counted.

    `quarantine`: source -> step of its last good reading. Rows without a token left are dropped.
    """
    num_tokens = sum(_leave_out(row, quarantine, step) for row in group.rows)
    counted = group.counts.get("num_quarantined_tokens", 0) + num_tokens
    return replace(
        group,
        rows=tuple(row for row in group.rows if len(row.targets)),
        counts=group.counts | {"num_quarantined_tokens": counted},
    )


def is_trusted(
    spans: Sequence[TokenSpan], staleness: NDArray[np.int64], quarantine: Mapping[str, int], step: int
) -> NDArray[np.bool_]:
    """False [S] for a quarantined server's tokens that are newer than its last good reading.

    `staleness` [S] of the tokens of `spans` for a learner that has done `step` steps.
    """
    sources = [free_source(span.source) for span in spans]
    if not any(source in quarantine for source in sources):
        return np.ones(len(staleness), np.bool_)
    last_good = [quarantine.get(source, step) for source in sources]
    return step - staleness <= np.repeat(last_good, [span.num_tokens for span in spans])


def _leave_out(row: TrainingRow, quarantine: Mapping[str, int], step: int) -> int:
    """Removes targets from the row; returns their number."""
    stays = is_trusted(row.spans, row.staleness, quarantine, step)
    if stays.all():
        return 0
    cut_down(row, stays)
    return int(np.count_nonzero(~stays))


def cut_down(row: TrainingRow, stays: NDArray[np.bool_]) -> None:
    """Reduces the row, in place, to the targets [M] that stay."""
    row.spans = kept_spans(row.spans, stays)
    for name in _PER_TARGET:
        if (values := getattr(row, name)) is not None:
            setattr(row, name, values[stays])
    if len(row.targets):
        row.token_ids = row.token_ids[: row.targets[-1]]
