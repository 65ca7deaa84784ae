"""Folders on an object store, named by fsspec URLs: `s3://bucket/path`, `gs://...`, `file:///...`.

A folder counts as complete once the file that its writer sends last is there. Downloads go to a folder
beside the target, which is renamed when all files are there; files that an interrupted download left
are not fetched again. Credentials come from the environment (`AWS_SHARED_CREDENTIALS_FILE`, ...).
Every failure of the store is `ObjectStoreError`; a URL that cannot be used is `ConfigError`.
"""

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, TypeVar

from tailrace.config import ConfigError
from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.import_path import load_extra
from tailrace.log import get_logger

log = get_logger(__name__)

_URL = re.compile(r"^[a-z][a-z0-9+.-]*://")
_ATTEMPTS = 3
_PAUSE_S = 1.0
_WITHOUT_FOLDERS = (
    "s3://",
    "s3a://",
    "gs://",
    "gcs://",
    "az://",
    "abfs://",
)  # folders need not be made

T = TypeVar("T")


class ObjectStoreError(OSError):
    """The store refused an operation. Attributes: `url`, `reason`."""

    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"object store: {url}: {reason}")
        self.url = url
        self.reason = reason


def is_url(name: str) -> bool:
    """True for a URL of an object store, false for a path or a name of the hub."""
    return _URL.match(name) is not None


class StoredFolder:
    """A folder at a URL; `key` is the setting that names it, for errors."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url.rstrip("/")
        fsspec = load_extra("fsspec", "s3", key)
        try:
            with foreign_code(self.url):
                self._files, path = fsspec.core.url_to_fs(self.url)
        except ForeignCodeError as error:
            remedy = (
                "pip install 'tailrace[s3]'" if self.url.startswith("s3") else "install its package"
            )
            raise ConfigError(f"{key}: cannot use {url}: {error.error}: {remedy}") from error
        self._path = path.rstrip("/")

    def names(self) -> dict[str, int]:
        """Sizes of all files in it, by path below it; empty if there is none."""
        self._files.invalidate_cache()
        found = self._call(lambda: self._files.find(self._path, detail=True))
        start = len(self._path) + 1
        return {path[start:]: int(info["size"]) for path, info in found.items() if path[start:]}

    def read(self, name: str) -> bytes:
        """Content of a file."""
        content = self._call(lambda: self._files.cat_file(f"{self._path}/{name}"))
        return bytes(content)

    def upload(self, folder: Path, last: str) -> None:
        """Send all files of a folder, `last` after all others; without it the folder is incomplete."""
        if last in self.names():
            self.delete([last])
        if not self.url.startswith(_WITHOUT_FOLDERS):
            self._call(lambda: self._files.makedirs(self._path, exist_ok=True))
        names = sorted(path.name for path in folder.iterdir() if path.is_file())
        for name in (*(each for each in names if each != last), last):
            self._call(self._sending(folder / name, name))
        self.delete([name for name in self.names() if name not in names])

    def _sending(self, path: Path, name: str) -> Callable[[], Any]:
        return lambda: self._files.put_file(str(path), f"{self._path}/{name}")

    def delete(self, names: Sequence[str]) -> None:
        """Delete files."""
        for name in names:
            self._call(self._deleting(f"{self._path}/{name}"))

    def _deleting(self, path: str) -> Callable[[], Any]:
        return lambda: self._files.rm_file(path)

    def download(self, target: Path, patterns: Sequence[str] = ("*",)) -> Path:
        """Fetch the files whose paths match into `target`, which appears when they are complete."""
        wanted = {
            name: size
            for name, size in self.names().items()
            if any(fnmatch(name, pattern) for pattern in patterns)
        }
        if not wanted:
            raise ObjectStoreError(self.url, "there is no such folder, or it holds no file")
        part = target.with_name(f".part-{target.name}")
        for name, size in wanted.items():
            path = part / name
            if part.resolve() not in path.resolve().parents:
                raise ObjectStoreError(self.url, f"{name} is outside of the folder")
            if path.is_file() and path.stat().st_size == size:
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            self._call(self._fetching(name, path))
            if path.stat().st_size != size:
                raise ObjectStoreError(self.url, f"{name} has {path.stat().st_size} bytes, not {size}")
        if target.exists():
            shutil.rmtree(target)
        part.rename(target)
        return target

    def _fetching(self, name: str, path: Path) -> Callable[[], Any]:
        return lambda: self._files.get_file(f"{self._path}/{name}", str(path))

    def _call(self, work: Callable[[], T]) -> T:
        """Do `work`, again after a failure that may pass."""
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                with foreign_code(self.url):
                    return work()
            except ForeignCodeError as error:
                is_final = isinstance(error.error, FileNotFoundError | PermissionError)
                if attempt == _ATTEMPTS or is_final:
                    reason = f"{type(error.error).__name__}: {error.error}"
                    raise ObjectStoreError(self.url, reason) from error
                log.warning("object store: tried again", url=self.url, error=str(error.error))
                time.sleep(_PAUSE_S * attempt)
        raise AssertionError("unreachable")


def fetched(url: str, key: str, patterns: Sequence[str] = ("*",)) -> Path:
    """Local copy of a folder, fetched once on this host; `ConfigError` names `key`."""
    name = hashlib.sha256(f"{url} {patterns}".encode()).hexdigest()[:16]
    target = _cache() / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_name(f".lock-{name}")):
        if target.is_dir():
            return target
        try:
            return StoredFolder(url, key).download(target, patterns)
        except OSError as error:
            raise ConfigError(
                f"{key}: cannot fetch {url}: {error}: correct the URL, or the credentials of the store"
            ) from error


def _cache() -> Path:
    given = os.environ.get("TAILRACE_STATE_DIR", "")
    home = Path(os.path.expanduser(os.environ.get("XDG_CACHE_HOME", "") or "~/.cache"))
    return (Path(given) if given else home / "tailrace") / "fetched"


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
