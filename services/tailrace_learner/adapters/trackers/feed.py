"""Every finished row of the run for one tracker, read from `metrics.jsonl` in a thread of its own.

Invariants: the learner never waits for a tracker; a tracker has each step once, as `metrics.jsonl` has
it. A tracker takes no row back: if its rows differ from the file, because steps were taken back or the
tracker failed, the feed makes a new one and gives it all rows. A learner that resumes does the same,
so that no row of its predecessor is missing.
"""

import asyncio
import threading

from tailrace.foreign import ForeignCodeError, foreign_code
from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace_learner import metrics
from tailrace_learner.adapters.trackers import MakeTracker
from tailrace_learner.adapters.trackers.row_file import RowFile
from tailrace_learner.ports import MetricsRow, Tracker
from tailrace_protos.base import UNREADABLE

log = get_logger(__name__)

_POLL_S = 0.5
_CLOSE_S = 8.0  # limit for the rows that are not delivered yet when the learner ends
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0  # after a failure
_REMEDY = "free space on the disk of output_dir; for a server, check its address and your login"


class TrackerFeed:
    """Delivers the rows of steps up to the one that this learner has reached.

    Later rows come from a learner that died after its last checkpoint: the scheduler is about to take
    them back.
    """

    def __init__(self, name: str, make: MakeTracker, rows: RowFile, step: int) -> None:
        self._name = name
        self._make = make
        self._rows = rows
        self._step = step
        self._tracker: Tracker | None = None
        self._delivered: list[int] = []
        self._num_found = 0  # of these, in the file that is read now
        self._waiting: list[MetricsRow] = []
        self._backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        self._ending = threading.Event()
        # A daemon: a tracker that hangs does not keep the process alive.
        self._thread = threading.Thread(target=self._run, name=f"{name} feed", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def reached(self, step: int) -> None:
        """Allow the rows up to this step: `StepFinished` of it was emitted. Returns at once."""
        self._step = step

    async def close(self) -> None:
        """Deliver the remaining rows and end; a tracker that takes too long is abandoned."""
        self._ending.set()
        await asyncio.to_thread(self._thread.join, _CLOSE_S)
        if self._thread.is_alive():
            metrics.FAILED_TRACKERS.labels(self._name).inc()
            log.error("tracker abandoned: it takes too long", tracker=self._name, waited_s=_CLOSE_S)

    def deliver(self) -> bool:
        """Bring the tracker up to the file; False if that failed and the tracker begins again."""
        try:
            self._deliver()
        except (OSError, ForeignCodeError, *UNREADABLE) as error:
            self._failed(error)
            return False
        self._backoff.reset()
        return True

    def _run(self) -> None:
        pause_s = _POLL_S
        while not self._ending.wait(pause_s):
            pause_s = _POLL_S if self.deliver() else self._backoff.next_s()
        if self.deliver():
            try:
                self._close_tracker()
            except ForeignCodeError as error:
                self._failed(error)

    def _deliver(self) -> None:
        while True:
            rows, is_other_file = self._rows.read()
            if is_other_file:
                self._num_found, self._waiting = 0, []
            num_old = self._find_delivered(rows)
            if num_old is None:  # the tracker has rows that the file lacks
                self._close_tracker()
                self._forget()
                continue
            self._give(rows[num_old:])
            if not rows:
                return

    def _find_delivered(self, rows: list[MetricsRow]) -> int | None:
        """Number of the next rows of the file that the tracker has; None if they differ."""
        end = self._num_found + len(rows) if rows else None
        expected = self._delivered[self._num_found : end]
        self._num_found += len(expected)
        is_found = [_key(row) for row in rows[: len(expected)]] == expected
        return len(expected) if is_found else None

    def _give(self, rows: list[MetricsRow]) -> None:
        self._waiting += rows
        ready = [row for row in self._waiting if (row["step"] or 0) <= self._step]
        if not ready:
            return
        self._waiting = self._waiting[len(ready) :]
        with foreign_code(f"tracker {self._name}"):
            if self._tracker is None:
                self._tracker = self._make()
            for row in ready:
                self._tracker.write(row)
            self._tracker.flush()
        self._delivered += map(_key, ready)
        self._num_found = len(self._delivered)

    def _forget(self) -> None:
        """Begin again with the first row."""
        self._delivered, self._num_found, self._waiting = [], 0, []
        self._rows.restart()

    def _close_tracker(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            with foreign_code(f"tracker {self._name}"):
                tracker.close()

    def _failed(self, error: Exception) -> None:
        metrics.FAILED_TRACKERS.labels(self._name).inc()
        if self._backoff.num_failures == 0:
            log.error("tracker fails", tracker=self._name, error=str(error), remedy=_REMEDY)
        try:
            self._close_tracker()
        except ForeignCodeError as of_close:
            log.warning("failed tracker not closed", tracker=self._name, error=str(of_close))
        self._forget()


def _key(row: MetricsRow) -> int:
    """Equal for equal rows: any cell may be added later."""
    return hash(frozenset(row.items()))
