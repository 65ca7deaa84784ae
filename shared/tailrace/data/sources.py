"""Sources of rows: files, the Hugging Face hub and Python functions; each row with its place."""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from tailrace.config import ConfigError
from tailrace.data.config import SUFFIXES as _SUFFIXES
from tailrace.data.config import DatasetEntry
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_object

Place = str
RawRows = Iterator[tuple[Any, Place]]

_END = object()


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
    path = Path(entry.path).expanduser()
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
    path = Path(entry.path).expanduser()
    if not path.is_dir():
        return [path]
    for folder in (path, *(path / name for name in (entry.name, "data") if name)):
        for suffix in _SUFFIXES:
            if (found := folder / f"{entry.split}{suffix}").is_file():
                return [found]
            if parts := sorted(folder.glob(f"{entry.split}-*{suffix}")):
                return parts
    names = ", ".join(entry.split + suffix for suffix in _SUFFIXES)
    raise ConfigError(f"{key}.split: folder {path} holds none of {names}: correct split or path")


def _opened(path: Path, key: str) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise ConfigError(f"{key}.path: cannot read {path}: {error.strerror}") from error


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
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: is not valid JSON: {error}") from error


def _parquet(entry: DatasetEntry, key: str) -> RawRows:
    needs = "parquet files need pyarrow"
    pyarrow, parquet = _extra("pyarrow", key, needs), _extra("pyarrow.parquet", key, needs)
    for path in _files(entry, key):
        try:
            batches = parquet.ParquetFile(path).iter_batches()
        except (OSError, pyarrow.ArrowInvalid) as error:
            raise ConfigError(f"{key}.path: cannot read {path}: {error}") from error
        rows = (row for batch in batches for row in batch.to_pylist())
        for index, row in enumerate(rows):
            yield row, f"{path}[{index}]"


def _hub(entry: DatasetEntry, key: str) -> RawRows:
    datasets = _extra("datasets", key, f"hub data set {entry.path!r} needs the package datasets")
    try:
        with foreign_code(f"{key}: loading {entry.path!r} from the hub"):
            name = entry.name or None
            rows = datasets.load_dataset(entry.path, name, split=entry.split, **entry.options)
    except ForeignCodeError as error:
        raise ConfigError(
            f"{error}. Correct path, name (configuration) and split. Without a network, load it once "
            "where there is one and copy HF_HOME, or give the path of a folder with its files"
        ) from error
    for index, row in enumerate(rows):
        yield row, f"{entry.path}/{entry.split}[{index}]"


def _python(entry: DatasetEntry, key: str) -> RawRows:
    make = load_object(entry.path, f"{key}.path")
    index, rows = 0, None
    while True:
        try:
            with foreign_code(f"{key}: {entry.path}"):
                rows = iter(make(split=entry.split, **entry.options)) if rows is None else rows
                row = next(rows, _END)
        except ForeignCodeError as error:
            raise ConfigError(str(error)) from error
        if row is _END:
            return
        yield row, f"{entry.path}[{index}]"
        index += 1


def _extra(module: str, key: str, needs: str) -> Any:
    """Imports a module of the extra `data`; `ConfigError` if it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"{key}.path: {needs}: pip install 'tailrace[data]'") from error


_SOURCES: dict[str, Callable[[DatasetEntry, str], RawRows]] = {
    "jsonl": _jsonl,
    "json": _json,
    "parquet": _parquet,
    "hub": _hub,
    "python": _python,
}
