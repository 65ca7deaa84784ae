"""Data sets in memory, and their sources: files, the Hugging Face hub and Python functions."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from glob import escape
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
import numpy as np
from numpy.typing import NDArray

from tailrace.config import ConfigError
from tailrace.data.config import SUFFIXES as _SUFFIXES
from tailrace.data.config import DatasetEntry
from tailrace.data.rows import Row, complete_row, renamed
from tailrace.foreign import ForeignCodeError, foreign_call
from tailrace.import_path import load_extra, load_object

Place = str
RawRows = Iterator[tuple[Any, Place]]

_END = object()
_OF_PARTS = re.compile(r"-\d+-of-(\d+)\b")


def raw_rows(entry: DatasetEntry, key: str) -> RawRows:
    """Yields all rows of a source in its order; `ConfigError` names `key`, place and remedy."""
    kind = _kind(entry, key) if entry.format == "auto" else entry.format
    return _SOURCES[kind](entry, key)


def source_baselines(entry: DatasetEntry) -> dict[str, Callable[..., float]]:
    """Simple players by name, the attribute `baselines` of a Python function that yields rows.

    Each takes a row and a `numpy.random.Generator` and returns its success, 0 to 1.
    """
    if entry.format not in ("auto", "python") or ":" not in entry.path:
        return {}
    return getattr(load_object(entry.path, "path"), "baselines", {})


def _kind(entry: DatasetEntry, key: str) -> str:
    path = Path(os.path.expanduser(entry.path))
    if path.is_dir():
        return _SUFFIXES[_files(entry, key)[0].suffix]
    if path.suffix in _SUFFIXES:
        return _SUFFIXES[path.suffix]
    if ":" in entry.path:
        return "python"
    if entry.is_hub:
        return "hub"
    raise ConfigError(
        f"{key}.path: {entry.path!r} is neither a file ({', '.join(_SUFFIXES)}), a folder, owner/name "
        "of the hub nor module:function: correct it, or set `format`"
    )


def _files(entry: DatasetEntry, key: str) -> list[Path]:
    """The file, or the split's files in a folder: `train.jsonl`, or parts of it."""
    path = Path(os.path.expanduser(entry.path))
    if not path.is_dir():
        return [path]
    for folder in (path, *(path / name for name in (entry.name, "data") if name)):
        for suffix in _SUFFIXES:
            if (found := folder / f"{entry.split}{suffix}").is_file():
                return [found]
            if parts := sorted(folder.glob(f"{escape(entry.split)}-*{suffix}")):
                _check_complete(parts, key)
                return parts
    names = ", ".join(entry.split + suffix for suffix in _SUFFIXES)
    raise ConfigError(f"{key}.split: folder {path} holds none of {names}: correct split or path")


def _check_complete(parts: Sequence[Path], key: str) -> None:
    """Raises `ConfigError` if parts that name their number (`-of-00002`) are fewer or more."""
    wanted = {int(found[1]) for part in parts if (found := _OF_PARTS.search(part.name))}
    if wanted and wanted != {len(parts)}:
        numbers = " and ".join(map(str, sorted(wanted)))
        raise ConfigError(
            f"{key}.path: {parts[0].parent} holds {len(parts)} files that are parts of {numbers}: copy "
            "the missing ones, or remove those of another copy"
        )


def _opened(path: Path, key: str) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        reason = f"{error.strerror}{_place(path)}"
        raise ConfigError(f"{key}.path: cannot read {path}: {reason}") from error


def _place(path: Path) -> str:
    """Says where a relative path was looked for, as an end of a sentence."""
    if path.is_absolute():
        return ""
    return f"; paths are relative to the folder where Tailrace was started, {Path.cwd()}"


def _jsonl(entry: DatasetEntry, key: str) -> RawRows:
    for path in _files(entry, key):
        with _opened(path, key) as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _decode(line, f"{path}:{number}"), f"{path}:{number}"


def _json(entry: DatasetEntry, key: str) -> RawRows:
    for path in _files(entry, key):
        with _opened(path, key) as file:
            content = _decode(file.read(), str(path))
        if not isinstance(content, list):
            raise ConfigError(f"{path}: must hold a list of rows, found {type(content).__name__}")
        for index, row in enumerate(content):
            yield row, f"{path}[{index}]"


def _decode(content: bytes, place: str) -> Any:
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"{place}: is not valid JSON: {_reason(content, error)}: correct it (UTF-8, without a byte "
            "order mark)"
        ) from error


def _reason(content: bytes, error: Exception) -> str:
    """Reason why a text is no JSON; Python's own reader takes more, and its writer writes it."""
    try:
        json.loads(content.decode())
    except (ValueError, RecursionError):
        return str(error)
    return "it has NaN, Infinity or half of a surrogate pair (\\ud800 to \\udfff), which JSON lacks"


def _parquet(entry: DatasetEntry, key: str) -> RawRows:
    parquet = load_extra("pyarrow.parquet", "data", f"{key}.path: a parquet file")
    for path in _files(entry, key):
        _opened(path, key).close()
        try:
            for index, row in enumerate(_pulled(partial(_rows_of, parquet, path), "reading it")):
                yield row, f"{path}[{index}]"
        except ForeignCodeError as error:
            raise ConfigError(
                f"{key}.path: cannot read {path}: {error.error}: copy or download it again"
            ) from error


def _rows_of(parquet: Any, path: Path) -> Iterator[Any]:
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _hub(entry: DatasetEntry, key: str) -> RawRows:
    datasets = load_extra("datasets", "data", f"{key}.path: the hub data set {entry.path!r}")
    name = entry.name or None

    def load() -> Any:
        return datasets.load_dataset(entry.path, name, split=entry.split, **entry.options)

    try:
        for index, row in enumerate(_pulled(load, f"{key}: loading {entry.path!r} from the hub")):
            yield row, f"{entry.path}/{entry.split}[{index}]"
    except ForeignCodeError as error:
        raise ConfigError(
            f"{error}. Correct path, name (configuration) and split. Without a network, load it once "
            "where there is one and copy HF_HOME, or give the path of a folder with its files"
        ) from error


def _python(entry: DatasetEntry, key: str) -> RawRows:
    made_by = load_object(entry.path, f"{key}.path")

    def make() -> Any:
        return made_by(split=entry.split, **entry.options)

    try:
        for index, row in enumerate(_pulled(make, f"{key}: {entry.path}")):
            yield row, f"{entry.path}[{index}]"
    except ForeignCodeError as error:
        raise ConfigError(str(error)) from error


def _pulled(make: Callable[[], Any], where: str) -> Iterator[Any]:
    """Rows of code that is not ours, one after another; raises `ForeignCodeError`."""
    rows = None
    while True:
        with foreign_call(where):
            rows = iter(make()) if rows is None else rows
            row = next(rows, _END)
        if row is _END:
            return
        yield row


_SOURCES: dict[str, Callable[[DatasetEntry, str], RawRows]] = {
    "jsonl": _jsonl,
    "json": _json,
    "parquet": _parquet,
    "hub": _hub,
    "python": _python,
}


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
                with foreign_call(f"{place}: {entry.converter}"):
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
