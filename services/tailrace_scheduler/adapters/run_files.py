"""`events.jsonl` and `metrics.jsonl`: written by this process alone, each line once.

A line is complete or absent: what a crash left torn at the end is cut off at the next start, and a
write that the disk refuses leaves the file as it was. Lines reach the operating system before a write
returns, so killing the process loses none; a machine that loses power may.
"""

import errno
import fcntl
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import msgspec

from tailrace.config import ConfigError
from tailrace_protos.event import Event
from tailrace_scheduler.ports import DiskFullError, Row

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_encoder = msgspec.json.Encoder()
_event_decoder = msgspec.json.Decoder(Event)
_row_decoder = msgspec.json.Decoder(Row)


class LineFile:
    """A file of whole lines that only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            if error.errno in _NO_SPACE:
                raise DiskFullError(path, 0) from error
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; make output_dir a folder that can be written"
            ) from error
        self._size = 0

    def lock(self) -> bool:
        """Become the file's only writer until this process ends; False if another one is."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def recover(self) -> Iterator[bytes]:
        """Yields all complete lines; after the last one cuts off a torn one at the end."""
        self._size = 0
        with self.path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n"):
                    self._size += len(line)
                    yield line
        if self._size < os.fstat(self._descriptor).st_size:
            os.ftruncate(self._descriptor, self._size)

    def append(self, lines: Iterable[bytes]) -> None:
        """Add lines, all or none; raises `DiskFullError`."""
        content = b"".join(line + b"\n" for line in lines)
        view = memoryview(content)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError as error:
            if len(view) < len(content):
                os.ftruncate(self._descriptor, self._size)
            if error.errno in _NO_SPACE:
                raise DiskFullError(self.path, len(content)) from error
            raise
        self._size += len(content)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class EventFile:
    """`events.jsonl`: the events of a run in their order."""

    def __init__(self, run_dir: Path) -> None:
        self._file = LineFile(run_dir / "events.jsonl")
        self._last = (-1, -1)

    def lock(self) -> bool:
        """Become the run's only writer; False while another scheduler is."""
        return self._file.lock()

    def recover(self) -> Iterator[Event]:
        """Yields all events written so far; `append` is for when the last one has been taken."""
        event = None
        try:
            for line in self._file.recover():
                event = _event_decoder.decode(line)
                yield event
        except msgspec.DecodeError as error:
            raise ConfigError(
                f"{self._file.path} holds a line that is no event ({error}): something else "
                "wrote to it; choose another exp_name, or move the run directory away"
            ) from error
        if event is not None:
            self._last = order(event.seq)

    def append(self, events: Sequence[Event]) -> list[Event]:
        """Write those that are newer than the last one written; returns them."""
        fresh = [event for event in events if order(event.seq) > self._last]
        if fresh:
            self._file.append(_encoder.encode(event) for event in fresh)
            self._last = order(fresh[-1].seq)
        return fresh

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MetricsFile:
    """`metrics.jsonl`: a row per learner step of the surviving lineage."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._file = LineFile(self._path)
        self._rows: list[Row] = []

    def recover(self, expected: Sequence[Row]) -> None:
        """Make the file hold the rows that the events tell of, keeping what rows it has of them."""
        # Another scheduler may have replaced the file since this one opened it.
        self._file.close()
        self._file = LineFile(self._path)
        found = [_row_decoder.decode(line) for line in self._file.recover()]
        known = {(row.get("step"), row.get("policy_version")): row for row in found}
        self._rows = [
            row | _told(known.get((row["step"], row["policy_version"]), {})) for row in expected
        ]
        if self._rows != found:
            self._rewrite(self._rows)

    def append(self, row: Row) -> None:
        """Add the row of the next step."""
        self._file.append([_encoder.encode(row)])
        self._rows.append(row)

    def rewind(self, step: int) -> None:
        """Take back the rows of later steps."""
        kept = [row for row in self._rows if (row["step"] or 0) <= step]
        if len(kept) < len(self._rows):
            self._rewrite(kept)
            self._rows = kept

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rewrite(self, rows: Sequence[Row]) -> None:
        """Replace the file by one with these rows, in one step."""
        fresh = self._path.with_suffix(".jsonl.new")
        fresh.unlink(missing_ok=True)
        with closing(LineFile(fresh)) as file:
            file.append(_encoder.encode(row) for row in rows)
        fresh.replace(self._path)
        self._file.close()
        self._file = LineFile(self._path)
        for _ in self._file.recover():
            pass


def _told(row: Row) -> Row:
    """Cells of a row that have a value."""
    return {key: value for key, value in row.items() if value is not None}


def order(seq: str) -> tuple[int, int]:
    """An outbox id as something that sorts."""
    milliseconds, _, number = seq.partition("-")
    return int(milliseconds), int(number)
