"""SQLite files that several processes open at their start."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = "sqlite:///"


@contextmanager
def made_by_one(uri: str) -> Iterator[None]:
    """Makes the folder of a SQLite file, and keeps other processes of this machine waiting meanwhile.

    Tables that two processes make at the same time fail in both. Addresses other than `sqlite:///` have
    a server that sees to it.
    """
    if not uri.startswith(_PREFIX):
        yield
        return
    path = Path(uri.removeprefix(_PREFIX).partition("?")[0])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_name(f"{path.name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
