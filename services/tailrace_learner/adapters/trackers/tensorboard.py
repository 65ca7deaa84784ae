"""Rows for TensorBoard, under `<run_dir>/tensorboard/`: one record per row, its keys as scalars."""

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from tailrace.config import RunConfig
from tailrace_learner.adapters.trackers.row_file import run_start_unix_s
from tailrace_learner.ports import MetricsRow, known_numbers


class TensorboardTracker:
    """A file of rows from the run's first on; it hides the rows of earlier files in the folder.

    Each point has the time at which its step ended, also if it is written again.
    """

    def __init__(self, run: RunConfig) -> None:
        self._started_unix_s = run_start_unix_s(run.run_dir)
        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"))
        begin = SessionLog(status=SessionLog.START)  # TensorBoard drops older points from `step` on
        self._writer.add_event(Event(wall_time=self._started_unix_s, step=0, session_log=begin))

    def write(self, row: MetricsRow) -> None:
        """Write the known numbers; an unknown value leaves a gap."""
        step, numbers = known_numbers(row)
        values = [Summary.Value(tag=key, simple_value=number) for key, number in numbers.items()]
        time_s = self._started_unix_s + numbers["time_s"]
        self._writer.add_event(Event(wall_time=time_s, step=step, summary=Summary(value=values)))

    def flush(self) -> None:
        """Return once all rows are in the file."""
        self._writer.flush()

    def close(self) -> None:
        """Flush, and close the file."""
        self._writer.close()
