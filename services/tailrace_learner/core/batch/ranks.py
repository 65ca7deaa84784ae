"""Rows over ranks: who computes which rows of a mini-batch, in how many passes.

Every rank holds a mirror of the same trainer and is told the same groups, so each knows the share of
all others without asking. Invariants: a row stays with its rank through all epochs of a step; every
rank does the same number of passes, those without rows an idle one, since sharded weights are gathered
by all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest
from typing import TypeVar

from tailrace_learner.core.batch.rows import TrainingRow

T = TypeVar("T")
Cut = Callable[[Sequence[TrainingRow]], Iterable[list[TrainingRow]]]


class OneRank:
    """A learner of one process."""

    rank = 0
    num_ranks = 1

    def sums(self, values: Sequence[float]) -> list[float]:
        """The values."""
        return list(values)

    def collect(self, mine: T) -> list[T]:
        """Only ours."""
        return [mine]


ONE_RANK = OneRank()


class Shares:
    """The rows of one mini-batch, spread so that every rank has about as many tokens."""

    def __init__(self, num_ranks: int) -> None:
        self._owners: dict[int, int] = {}  # by the row's identity: rows live as long as their step
        self._num_tokens = [0] * num_ranks

    def split(self, rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
        """Each rank's part of `rows`; new ones go, longest first, to who has the fewest tokens."""
        shares: list[list[TrainingRow]] = [[] for _ in self._num_tokens]
        if len(shares) == 1:
            return [list(rows)]
        for row in sorted(rows, key=lambda row: -len(row.token_ids)):
            shares[self._owner(row)].append(row)
        return shares

    def passes(self, rows: Sequence[TrainingRow], rank: int, cut: Cut) -> list[list[TrainingRow]]:
        """The passes of `rank`, as many as those of the busiest one; idle ones are empty.

        `cut` makes passes of one rank's rows.
        """
        each = [list(cut(share)) for share in self.split(rows)]
        return [turn[rank] for turn in zip_longest(*each, fillvalue=[])]

    def _owner(self, row: TrainingRow) -> int:
        owner = self._owners.get(id(row))
        if owner is None:
            owner = self._num_tokens.index(min(self._num_tokens))
            self._owners[id(row)] = owner
            self._num_tokens[owner] += len(row.token_ids)
        return owner
