"""Sample of a mini-batch's rows to read under older weights: few rows, each source in turn.

A source owes as many tokens as its next verdict needs. Tokens of the version that the step begins
with, which its own passes read, are paid already. The choice depends on rows, debts and steps alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from tailrace_learner.core.batch.rows import TrainingRow
from tailrace_learner.core.mismatch.drift import owners_of
from tailrace_learner.core.mismatch.quarantine import cut_down


class OldSample:
    """Rows of a mini-batch to read, until no source owes anything or `max_tokens` are reached.

    `last_read`: source -> last step in which some of its older tokens were chosen; kept up to date.
    """

    def __init__(
        self,
        rows: Sequence[TrainingRow],
        num_owed: Callable[[str], int],
        max_tokens: float,
        last_read: dict[str, int],
        step: int,
    ) -> None:
        self._rows = rows
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self._last_read = last_read
        self._step = step
        # All of [M], the targets of all rows.
        self._names, self._owners = owners_of(rows)
        self._ends = np.cumsum([len(row.targets) for row in rows])
        self._ages = np.concatenate([_ages(row) for row in rows])
        self._owed = np.array([num_owed(name) for name in self._names], np.int64)
        self._pay(self._owners[(self._ages == 0) & (self._owners >= 0)])

    def of_age(self, age: int) -> list[TrainingRow]:
        """Rows with tokens of that age alone as targets; sources not read for long come first."""
        is_wanted = (self._ages == age) & (self._owners >= 0)
        is_wanted[is_wanted] = self._owed[self._owners[is_wanted]] > 0
        chosen = []
        for index in self._order(is_wanted):
            mine = slice(self._ends[index] - len(self._rows[index].targets), self._ends[index])
            owners = self._owners[mine][is_wanted[mine]]
            if (self._owed[owners] <= 0).all():
                continue
            row = self._cut_to(index, is_wanted[mine])
            if self._num_tokens and self._num_tokens + len(row.token_ids) > self._max_tokens:
                break
            self._num_tokens += len(row.token_ids)
            self._pay(owners)
            self._last_read.update(dict.fromkeys((span.source for span in row.spans), self._step))
            chosen.append(row)
        return chosen

    def _order(self, is_wanted: NDArray[np.bool_]) -> list[int]:
        """Rows with wanted tokens, from a place of the step on, the first of each source before all.

        Sources that were not read for longer go before others.
        """
        places = np.searchsorted(self._ends, np.flatnonzero(is_wanted), side="right")
        begin = np.random.default_rng(self._step).integers(len(self._rows))
        turns = (places - begin) % len(self._rows)
        owners = self._owners[is_wanted]
        first = {
            self._names[owner]: int(turns[owners == owner].min())
            for owner in np.unique(owners).tolist()
        }
        sources = sorted(first, key=lambda source: (self._last_read.get(source, -1), first[source]))
        order = dict.fromkeys([*(first[source] for source in sources), *np.unique(turns).tolist()])
        return [int((turn + begin) % len(self._rows)) for turn in order]

    def _cut_to(self, index: int, wanted: NDArray[np.bool_]) -> TrainingRow:
        """Copies a row with the wanted targets alone."""
        row = replace(self._rows[index])
        cut_down(row, wanted)
        return row

    def _pay(self, owners: NDArray[np.int64]) -> None:
        self._owed -= np.bincount(owners, minlength=len(self._owed))


def _ages(row: TrainingRow) -> NDArray[np.int64]:
    """Steps since a target's version was the learner's own [M]; -1 where it never was."""
    own = row.is_current if row.is_own is None else row.is_own
    return np.where(own, row.staleness, -1)
