"""Prometheus metrics of the scheduler."""

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client import Counter, Gauge

from tailrace_protos.control import RunStatus
from tailrace_protos.event import EpisodeSettled, EventBody

STEP = Gauge(
    "tailrace_scheduler_step",
    "Optimizer steps of the run, by its phase now (starting, warm_start, evaluating, training, "
    "finishing, finished, failed).",
    ["phase"],
)
SETTLED = Counter(
    "tailrace_scheduler_settled_episodes",
    "Episodes that ended, whoever ended them: a worker or the scheduler.",
    ["phase", "outcome"],
)
GROUPS = Gauge(
    "tailrace_scheduler_groups", "Groups that are running, or ready and not trained yet.", ["state"]
)
SERVERS = Gauge("tailrace_scheduler_servers", "Inference servers that can get episodes.")
STEP_METRIC = Gauge(
    "tailrace_scheduler_step_metric", "Newest known value of a key of `metrics.jsonl`.", ["name"]
)
MAX_STALENESS = Gauge("tailrace_scheduler_max_staleness", "The experiment's `max_staleness`.")
FREE_DISK = Gauge("tailrace_scheduler_free_disk_bytes", "Free bytes under the run directory.")
EPISODES = Gauge(
    "tailrace_scheduler_unsettled_episodes", "Published episodes that have not ended: queued or played."
)
WAITING = Gauge("tailrace_scheduler_waiting_episodes", "Episodes that wait for their first server.")
BLOCKED = Gauge(
    "tailrace_scheduler_blocked", "1 for the reason that admission waits for now.", ["reason"]
)
HINTS = Gauge("tailrace_scheduler_hint", "1 for every health hint that holds now.", ["name"])
PENDING = Gauge(
    "tailrace_scheduler_pending_decisions",
    "Decisions not carried out yet, by what carries them out.",
    ["lane"],
)
LAGGING = Gauge(
    "tailrace_scheduler_lagging_servers", "Servers without new episodes, since their weights are old."
)
EVENTS = Counter("tailrace_scheduler_relayed_events", "Events written to the log and relayed.")
DECISIONS = Counter("tailrace_scheduler_decisions", "Decisions taken, by kind.", ["kind"])
LEASES = Counter("tailrace_scheduler_leases", "Leases given.")
UNPLACED = Counter("tailrace_scheduler_unplaced_requests", "Lease requests that were given no server.")
LEASES_HELD = Gauge("tailrace_scheduler_held_leases", "Leases held now.")
REPROVISIONED = Counter(
    "tailrace_scheduler_reprovisioned_streams", "Times the run's streams had vanished."
)
FULL_DISK_WAITS = Counter(
    "tailrace_scheduler_full_disk_waits", "Writes put off because the run directory's disk was full."
)

_OF_SERVERS = ("drift/", "drift_tokens/")  # begins of keys that name an inference server
_MAX_UNREAD_ROWS = 20


def watch_disk(folder: Path) -> None:
    """Exports the free bytes under a folder; while its disk fails they are not a number."""

    def free() -> float:
        try:
            return shutil.disk_usage(folder).free
        except OSError:  # one metric that raises would take all others with it
            return math.nan

    FREE_DISK.set_function(free)


def show_status(status: RunStatus) -> None:
    """Exports what the status says; of `STEP`, the run has one series at a time."""
    STEP.clear()
    STEP.labels(status.phase).set(status.step)
    GROUPS.labels("running").set(status.num_groups_running)
    GROUPS.labels("ready").set(status.num_groups_ready)
    SERVERS.set(status.num_servers)


def count(body: EventBody) -> None:
    """Counts a new event that a metric counts."""
    if isinstance(body, EpisodeSettled):
        SETTLED.labels(body.phase, body.outcome.value).inc()


class StepSeries:
    """Series of `STEP_METRIC`; a server that is gone keeps none."""

    def __init__(self) -> None:
        self._unread_rows: dict[str, int] = {}  # by key of a server: rows without it

    def recover(self, rows: Sequence[Mapping[str, float | None]]) -> None:
        """Exports the newest known numbers of the rows of earlier schedulers."""
        newest: dict[str, float | None] = {}
        for row in rows:
            newest.update(
                (name, value)
                for name, value in row.items()
                if value is not None and not name.startswith(_OF_SERVERS)
            )
        self.show(newest)
        for row in rows[-_MAX_UNREAD_ROWS:]:
            self.show(row)

    def show(self, row: Mapping[str, float | None]) -> None:
        """Exports the known numbers of a row of `metrics.jsonl`."""
        for name in self._unread_rows:
            self._unread_rows[name] += 1
        for name, value in row.items():
            if value is not None:
                STEP_METRIC.labels(name).set(value)
                if name.startswith(_OF_SERVERS):
                    self._unread_rows[name] = 0
        for name, num_rows in list(self._unread_rows.items()):
            if num_rows > _MAX_UNREAD_ROWS:
                STEP_METRIC.remove(name)
                del self._unread_rows[name]
