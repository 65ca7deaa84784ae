"""The error for a file of a run that holds something else than a run wrote there."""

from pathlib import Path
from typing import TypeVar

import msgspec

from tailrace.config import ConfigError
from tailrace_protos.base import UNREADABLE

T = TypeVar("T")


class DamagedRunError(ConfigError):
    """A file of a run holds something else than a run wrote there: `path`, `reason`."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(
            f"{path} is damaged, or of another version of Tailrace ({' '.join(str(reason).split())}): "
            "restore it, or move the run's folder away"
        )
        self.path = path
        self.reason = str(reason)


def decoded_line(decoder: msgspec.json.Decoder[T], line: bytes, path: Path) -> T:
    """Content of a whole line of the file at `path`. Raises `DamagedRunError`."""
    try:
        return decoder.decode(line)
    except UNREADABLE as error:
        raise DamagedRunError(path, error) from error
