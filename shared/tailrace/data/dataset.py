"""Loaded data set and the order of its rows.

Invariants: the row of the n-th task is a pure function of (run seed, n), in every worker and after a
resume. Every epoch visits each row once, in another order. Evaluations use the order of the file.
"""

import hashlib
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from tailrace.config import ConfigError
from tailrace.data.config import DatasetEntry
from tailrace.data.rows import Row, complete_row, renamed
from tailrace.data.sources import raw_rows
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_object


class Dataset:
    """Rows in memory. `seed`: seed of the run."""

    def __init__(self, rows: Sequence[Row], seed: int) -> None:
        assert rows
        self.rows = rows
        self._seed = seed

    def __len__(self) -> int:
        return len(self.rows)

    def train_row(self, ordinal: int) -> Row:
        """Row of the `ordinal`-th training task of this data set, counted from 0."""
        epoch, position = divmod(ordinal, len(self.rows))
        return self.rows[int(_permutation(len(self.rows), self._seed, epoch)[position])]

    def eval_row(self, ordinal: int) -> Row:
        """Row of the evaluation task `ordinal`; the first row follows the last one."""
        return self.rows[ordinal % len(self.rows)]


def load_dataset(entry: DatasetEntry, seed: int, key: str) -> Dataset:
    """Loads, converts and checks all rows; `ConfigError` names `key` or the row, and the remedy."""
    rows = list(_rows(entry, key))
    if not rows:
        raise ConfigError(_no_rows(entry, key))
    return Dataset(rows, seed)


def first_rows(entry: DatasetEntry, num_rows: int, key: str) -> list[Row]:
    """At most `num_rows` rows of the start, checked as `load_dataset` does; raises as it does."""
    rows = list(islice(_rows(entry, key), num_rows))
    if not rows:
        raise ConfigError(_no_rows(entry, key))
    return rows


def _no_rows(entry: DatasetEntry, key: str) -> str:
    return f"{key}: {entry.path} gives no rows: correct path, split or converter"


def _rows(entry: DatasetEntry, key: str) -> Iterator[Row]:
    convert = load_object(entry.converter, f"{key}.converter") if entry.converter else None
    num_rows = 0
    for raw, place in raw_rows(entry, key):
        converted = renamed(raw, entry.columns, place)
        if convert is not None:
            try:
                with foreign_code(f"{place}: {entry.converter}"):
                    converted = convert(converted)
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
    """Order of all rows. `RandomState` gives the same numbers in all versions of numpy."""
    digest = hashlib.blake2b(f"rows:{seed}:{epoch}".encode(), digest_size=4).digest()
    state = np.random.RandomState(int.from_bytes(digest, "big"))
    return state.permutation(num_rows)
