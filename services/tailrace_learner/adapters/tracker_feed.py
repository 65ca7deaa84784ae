"""Every finished row of the run for one tracker, read from `metrics.jsonl` in a thread of its own.

Invariants: the learner never waits for a tracker; a tracker holds each step once, as `metrics.jsonl`
has it. What a tracker was given is never taken back: where it differs from the file, because steps were
taken back or the tracker failed, the tracker is begun anew with all rows. A learner that resumes does
the same, so that rows which its predecessor did not deliver are not missing.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import msgspec

from tailrace.log import get_logger
from tailrace.retry import Backoff
from tailrace_learner import metrics
from tailrace_learner.adapters.row_file import RowFile
from tailrace_learner.ports import Row, Tracker, TrackerError

log = get_logger(__name__)

_POLL_S = 0.5
_CLOSE_S = 8.0  # for what is not delivered yet when the learner ends
_FIRST_PAUSE_S, _MAX_PAUSE_S = 1.0, 60.0  # after a failure
_Key = tuple[object, object]  # step and policy version


class TrackerFeed:
    """Delivers the rows of steps up to the one that this learner has reached.

    Later rows are of a learner that died after its last checkpoint: they are about to be taken back.
    """

    def __init__(self, name: str, begin: Callable[[], Tracker], rows: RowFile, step: int) -> None:
        self._name = name
        self._begin = begin
        self._rows = rows
        self._step = step
        self._tracker: Tracker | None = None
        self._delivered: list[_Key] = []
        self._waiting: list[Row] = []
        self._backoff = Backoff(_FIRST_PAUSE_S, _MAX_PAUSE_S)
        self._ending = threading.Event()
        # A daemon: a tracker that hangs does not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"{name} feed", daemon=True)

    def start(self) -> None:
        """Begin to deliver."""
        self._thread.start()

    def reached(self, step: int) -> None:
        """Rows up to this step are of this learner, or of those it continues."""
        self._step = step

    async def close(self) -> None:
        """Deliver what there is, and end; leaves a tracker behind that takes too long."""
        self._ending.set()
        await asyncio.to_thread(self._thread.join, _CLOSE_S)
        if self._thread.is_alive():
            metrics.FAILED_TRACKERS.labels(self._name).inc()
            log.error("tracker left behind: it takes too long", tracker=self._name, waited_s=_CLOSE_S)

    def deliver(self) -> bool:
        """Bring the tracker up to the file; False if that failed, and it begins anew."""
        try:
            self._deliver()
        except (OSError, TrackerError, msgspec.DecodeError) as error:
            self._failed(error)
            return False
        self._backoff.reset()
        return True

    def _run(self) -> None:
        pause_s = _POLL_S
        while not self._ending.wait(pause_s):
            pause_s = _POLL_S if self.deliver() else self._backoff.next_s()
        if self.deliver() and self._tracker is not None:
            try:
                self._tracker.close()
            except (OSError, TrackerError) as error:
                self._failed(error)

    def _deliver(self) -> None:
        rows, is_other_file = self._rows.read()
        if is_other_file:
            rows = self._without_delivered(rows)
        self._waiting += rows
        ready = [row for row in self._waiting if (row["step"] or 0) <= self._step]
        if not ready:
            return
        self._waiting = self._waiting[len(ready) :]
        if self._tracker is None:
            self._tracker = self._begin()
        for row in ready:
            self._tracker.write(row)
        self._tracker.flush()
        self._delivered += map(_key, ready)

    def _without_delivered(self, rows: list[Row]) -> list[Row]:
        """What a file that replaced the last one has beyond it, or all, for a new beginning."""
        self._waiting = []
        num_delivered = len(self._delivered)
        if [_key(row) for row in rows[:num_delivered]] == self._delivered:
            return rows[num_delivered:]
        if self._tracker is not None:
            tracker, self._tracker = self._tracker, None
            tracker.close()
        self._delivered = []
        return rows

    def _failed(self, error: Exception) -> None:
        metrics.FAILED_TRACKERS.labels(self._name).inc()
        if self._backoff.num_failures == 0:
            remedy = "free space on the disk of output_dir; for wandb, see that it is logged in"
            log.error("tracker fails", tracker=self._name, error=str(error), remedy=remedy)
        self._tracker, self._delivered, self._waiting = None, [], []
        self._rows.restart()


def _key(row: Row) -> _Key:
    return row["step"], row["policy_version"]
