"""Rows for TensorBoard, under `<run_dir>/tensorboard/`: one record per row, its keys as scalars."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tailrace_learner.ports import Row, known_numbers


class _FirstEvent(msgspec.Struct):
    """What is needed of the first line of `events.jsonl`."""

    unix_s: float


class TensorboardWriter:
    """A file of rows from the run's first on; it hides what earlier files of the folder hold.

    Points have the time at which their step ended, also those written again. `OSError` when the disk
    does not take them: it needs another file then.
    """

    def __init__(self, run_dir: Path) -> None:
        with (run_dir / "events.jsonl").open("rb") as events:
            self._started_unix_s = msgspec.json.decode(events.readline(), type=_FirstEvent).unix_s
        self._writer = EventFileWriter(str(run_dir / "tensorboard"))
        begin = SessionLog(status=SessionLog.START)  # TensorBoard drops older points from `step` on
        self._writer.add_event(Event(wall_time=self._started_unix_s, step=0, session_log=begin))

    def write(self, row: Row) -> None:
        """Write what is known; unknown values leave a gap."""
        step, numbers = known_numbers(row)
        values = [Summary.Value(tag=key, simple_value=number) for key, number in numbers.items()]
        time_s = self._started_unix_s + numbers["time_s"]
        self._writer.add_event(Event(wall_time=time_s, step=step, summary=Summary(value=values)))

    def flush(self) -> None:
        """Return once all of it is in the file."""
        self._writer.flush()

    def close(self) -> None:
        """Flush, and close the file."""
        self._writer.close()
