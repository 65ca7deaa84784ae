"""Rows over ranks: the rows of a mini-batch that each rank computes, and the number of passes.

Every rank holds a mirror of the same trainer and gets the same groups, so each knows the share of all
others without asking. Invariants: a row stays with its rank through all epochs of a step. Every rank
does the same number of passes, idle ones where it has no rows, since all ranks together gather
sharded weights.
"""

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
        """Gives the values back."""
        return list(values)

    def collect(self, mine: T) -> list[T]:
        """Gives the value of this rank alone."""
        return [mine]


ONE_RANK = OneRank()


class Shares:
    """Rows of one mini-batch, spread so that every rank has about as many tokens."""

    def __init__(self, num_ranks: int) -> None:
        self._owners: dict[int, int] = {}  # by the row's identity: rows live as long as their step
        self._num_tokens = [0] * num_ranks

    def split(self, rows: Sequence[TrainingRow]) -> list[list[TrainingRow]]:
        """Each rank's part of `rows`; new ones go, longest first, to the rank with fewest tokens."""
        shares: list[list[TrainingRow]] = [[] for _ in self._num_tokens]
        if len(shares) == 1:
            return [list(rows)]
        for row in sorted(rows, key=lambda row: -len(row.token_ids)):
            shares[self._owner(row)].append(row)
        return shares

    def passes(self, rows: Sequence[TrainingRow], rank: int, cut: Cut) -> list[list[TrainingRow]]:
        """Passes of `rank`, as many as those of the busiest one; idle ones are empty.

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
