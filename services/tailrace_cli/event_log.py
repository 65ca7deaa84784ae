"""`events.jsonl` of a run, read by commands; also while the run goes on."""

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from tailrace.config import ConfigError
from tailrace_cli.run_folders import find_run
from tailrace_protos.base import UNREADABLE
from tailrace_protos.event import Event


def log_of(run: str, output_dir: str) -> Path:
    """Returns the log of a run; `run` is a name, a directory or an `events.jsonl`."""
    file = Path(os.path.expanduser(run))
    for found in (file, file / "events.jsonl"):
        if found.is_file():
            return found
    path = find_run(run, output_dir).path / "events.jsonl"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist: nothing has happened yet in run {run}")
    return path


def read_events(path: Path) -> Iterator[Event]:
    """Yields the events of a log; a torn last line (the writer was killed) is left out."""
    decoder = msgspec.json.Decoder(Event)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield decoder.decode(line)
            except UNREADABLE as error:
                raise ConfigError(f"{path}:{number} is no event of this Tailrace: {error}") from error
