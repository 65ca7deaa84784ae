"""A loaded data set and its order.

Invariants: which row the n-th task gets is a pure function of (run seed, n): every epoch visits each
row once, in an order of its own, whichever worker asks, also after a resume; evaluations go through the
rows as they lie in the file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tailrace.config import ConfigError
from tailrace.data.config import DatasetEntry
from tailrace.data.rows import Row, complete_row
from tailrace.data.sources import raw_rows
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_object


class Dataset:
    """Rows in memory. `seed` is the run's."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        assert rows
        self.rows = rows
        self._seed = seed

    def __len__(self) -> int:
        return len(self.rows)

    def train_row(self, ordinal: int) -> Row:
        """The row of the `ordinal`-th training task of this data set, counted from 0."""
        epoch, position = divmod(ordinal, len(self.rows))
        return self.rows[int(_permutation(len(self.rows), self._seed, epoch)[position])]

    def eval_row(self, ordinal: int) -> Row:
        """The row of evaluation task `ordinal`; after the last row the first one comes again."""
        return self.rows[ordinal % len(self.rows)]


def load_dataset(entry: DatasetEntry, seed: int, key: str) -> Dataset:
    """All rows, converted and checked; `ConfigError` names `key` or the row's place, and the remedy."""
    rows = list(_rows(entry, key))
    if not rows:
        raise ConfigError(f"{key}: {entry.path} gives no rows: correct path, split or converter")
    return Dataset(rows, seed)


def _rows(entry: DatasetEntry, key: str) -> Iterator[Row]:
    convert = load_object(entry.converter, f"{key}.converter") if entry.converter else None
    num_rows = 0
    for raw, place in raw_rows(entry, key):
        converted = raw
        if convert is not None:
            try:
                with foreign_code(f"{place}: {entry.converter}"):
                    converted = convert(raw)
            except ForeignCodeError as error:
                raise ConfigError(str(error)) from error
            if converted is None:
                continue
        yield complete_row(converted, place, entry)
        num_rows += 1
        if num_rows == entry.limit:
            return


@lru_cache(maxsize=16)
def _permutation(num_rows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """An order of all rows. `RandomState`, because its numbers never change between numpy versions."""
    digest = hashlib.blake2b(f"rows:{seed}:{epoch}".encode(), digest_size=4).digest()
    state = np.random.RandomState(int.from_bytes(digest, "big"))
    return state.permutation(num_rows)
