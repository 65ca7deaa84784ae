"""`events.jsonl` and `metrics.jsonl`: written by this process alone, each line once.

A line is complete or absent: what a crash left torn at the end is cut off at the next start, and a
write that the disk refuses leaves the file as it was. Lines reach the operating system before a write
returns, so killing the process loses none. A machine that loses power loses the lines since the last
`sync`; events are acknowledged after it, and rows of metrics follow from the events.
"""

import errno
import fcntl
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from itertools import islice, zip_longest
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from tailrace.config import ConfigError
from tailrace_protos.base import UNREADABLE
from tailrace_protos.event import Event
from tailrace_scheduler.ports import DiskFullError, Row

T = TypeVar("T")

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_AT_ONCE = 1024  # lines of a file that is written anew
_FOLLOWED_AT_ONCE = 20_000  # half a second: a standby that is told to end does so
_encoder = msgspec.json.Encoder()
_event_decoder = msgspec.json.Decoder(Event)
_row_decoder = msgspec.json.Decoder(Row)


class LogShrunkError(Exception):
    """The writer took back events that this process has applied."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        super().__init__(
            f"{path} lost its last {num_bytes} bytes, which this standby had read: another scheduler's "
            "disk was full; start this one again"
        )


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
        self._size = os.fstat(self._descriptor).st_size  # with a torn line, until `recover`

    def lock(self) -> bool:
        """Become the file's only writer until this process ends; False if another one is."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def lines(self, begin: int = 0) -> Iterator[bytes]:
        """Yields the complete lines from byte `begin` on; another process may be writing more."""
        with self.path.open("rb") as file:
            file.seek(begin)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # what comes next may be its rest, which is written meanwhile
                yield line

    def recover(self, begin: int = 0) -> Iterator[bytes]:
        """Yields the complete lines from byte `begin` on; then cuts off a torn one at the end."""
        self._size = begin
        for line in self.lines(begin):
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

    def sync(self) -> None:
        """Return once all lines are on the disk; blocks."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class EventFile:
    """`events.jsonl`: the events of a run in their order."""

    def __init__(self, run_dir: Path) -> None:
        self._file = LineFile(run_dir / "events.jsonl")
        self._num_read = 0  # bytes
        self._last = (-1, -1)

    def lock(self) -> bool:
        """Become the run's only writer; False while another scheduler is."""
        return self._file.lock()

    def follow(self) -> Iterator[Event]:
        """Yields some more of the events that another scheduler has written; see `EventLog`."""
        return self._events(islice(self._file.lines(self._begin()), _FOLLOWED_AT_ONCE))

    def recover(self) -> Iterator[Event]:
        """Yields the events that `follow` has not; `append` is for when the last one has been taken."""
        return self._events(self._file.recover(self._begin()))

    def _begin(self) -> int:
        size = self._file.path.stat().st_size
        if size < self._num_read:  # a write that the writer's disk refused, and that it took back
            raise LogShrunkError(self._file.path, self._num_read - size)
        return self._num_read

    def _events(self, lines: Iterable[bytes]) -> Iterator[Event]:
        for line in lines:
            event = _decoded(_event_decoder, line, self._file.path)
            self._num_read += len(line)
            self._last = order(event.seq)
            yield event

    def append(self, events: Sequence[Event]) -> list[Event]:
        """Write those that are newer than the last one written; returns them."""
        fresh = [event for event in events if order(event.seq) > self._last]
        if fresh:
            self._file.append(_encoder.encode(event) for event in fresh)
            self._last = order(fresh[-1].seq)
        return fresh

    def sync(self) -> None:
        """Return once all events are on the disk; blocks, and runs beside `append`."""
        self._file.sync()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class MetricsFile:
    """`metrics.jsonl`: a row per learner step of the surviving lineage. Memory holds no rows."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "metrics.jsonl"
        self._file = LineFile(self._path)

    def recover(self, expected: Sequence[Row]) -> None:
        """Make the file hold the rows that the events tell of, keeping what rows it has of them."""
        # Another scheduler may have replaced the file since this one opened it.
        self._file.close()
        self._file = LineFile(self._path)
        found = map(self._row, self._file.recover())
        if not all(_is_known(row, other) for row, other in zip_longest(expected, found)):
            with self._path.open("rb") as file:
                self._rewrite(_encoder.encode(row) for row in self._merged(expected, file))

    def append(self, row: Row) -> None:
        """Add the row of the next step."""
        self._file.append([_encoder.encode(row)])

    def rewind(self, step: int) -> None:
        """Take back the rows of later steps; the others are not decoded."""
        num_bytes = self._size_up_to(step)
        if num_bytes < self._path.stat().st_size:
            with self._path.open("rb") as file:
                self._rewrite(_first_lines(file, num_bytes))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _row(self, line: bytes) -> Row:
        return _decoded(_row_decoder, line, self._path)

    def _size_up_to(self, step: int) -> int:
        """Bytes of the file up to the last row of a step that is not later; rows are in order."""
        end = self._path.stat().st_size
        if not end:
            return 0
        with self._path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as lines:
            while end:
                begin = lines.rfind(b"\n", 0, end - 1) + 1
                if (self._row(lines[begin:end])["step"] or 0) <= step:
                    break
                end = begin
        return end

    def _merged(self, expected: Sequence[Row], file: BinaryIO) -> Iterator[Row]:
        """The expected rows, each with what the file knows of it."""
        places: dict[tuple[float | None, float | None], int] = {}
        place = 0
        for line in self._file.recover():
            places[_name(self._row(line))] = place
            place += len(line)
        for row in expected:
            if (found := places.get(_name(row))) is None:
                yield row
            else:
                file.seek(found)
                yield _filled(row, self._row(file.readline()))

    def _rewrite(self, lines: Iterable[bytes]) -> None:
        """Replace the file by one with these lines, in one step."""
        fresh, left = self._path.with_suffix(".jsonl.new"), iter(lines)
        fresh.unlink(missing_ok=True)
        with closing(LineFile(fresh)) as file:
            while some := list(islice(left, _AT_ONCE)):
                file.append(some)
        fresh.replace(self._path)
        self._file.close()
        self._file = LineFile(self._path)


def _first_lines(file: BinaryIO, num_bytes: int) -> Iterator[bytes]:
    """Lines of the first bytes of a file, without their ends."""
    while file.tell() < num_bytes:
        yield file.readline().removesuffix(b"\n")


def _decoded(decoder: msgspec.json.Decoder[T], line: bytes, path: Path) -> T:
    try:
        return decoder.decode(line)
    except UNREADABLE as error:
        raise ConfigError(
            f"{path} holds a line that no scheduler wrote ({error}): something else wrote to it, or "
            "damaged it; choose another exp_name, or move the run directory away"
        ) from error


def _name(row: Row) -> tuple[float | None, float | None]:
    """Cells that tell rows apart."""
    return row.get("step"), row.get("policy_version")


def _filled(expected: Row, found: Row) -> Row:
    """The expected row with the values that the file has of it."""
    return expected | {key: value for key, value in found.items() if value is not None}


def _is_known(expected: Row | None, found: Row | None) -> bool:
    """Tell whether a row of the file is the expected one, and lacks nothing of it."""
    if expected is None or found is None or _name(expected) != _name(found):
        return False
    return _filled(expected, found) == found


def order(seq: str) -> tuple[int, int]:
    """An outbox id as something that sorts."""
    milliseconds, _, number = seq.partition("-")
    return int(milliseconds), int(number)
