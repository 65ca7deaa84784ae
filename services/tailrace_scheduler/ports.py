"""Ports of the scheduler: store, queue, event source and files, with their records."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from tailrace_protos.control import ServerStatus
from tailrace_protos.episode import EnvTask, EpisodeTask, Outcome
from tailrace_protos.event import Event, EventBody
from tailrace_protos.subjects import Phase

Row = dict[str, float | int | None]
"""A line of `metrics.jsonl`."""


class DiskFullError(OSError):
    """The run directory's disk has no room for a line; the file is as it was.

    Attributes: `path`, `num_bytes` (what did not fit).
    """

    def __init__(self, path: Path, num_bytes: int) -> None:
        super().__init__(
            f"no space for {num_bytes} bytes in {path}: free space on that disk; the run waits and "
            "goes on by itself, nothing is lost"
        )
        self.path = path
        self.num_bytes = num_bytes


class GroupPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A group of episodes: to be recorded and then published, or found open after a restart."""

    group_id: str
    group_index: int  # place in the data order of its phase
    phase: Phase
    tasks: tuple[EnvTask, ...]  # one per member
    deadline_unix_s: float
    min_valid: int
    step: int  # optimizer step at admission
    timeout_s: float = 0.0  # from admission to the deadline
    attempts: tuple[int, ...] = ()  # current attempt of each member; empty: all 0
    settled: dict[int, Outcome] = {}  # member -> outcome
    begun_step: int = -1  # optimizer step of its first tokens; -1: none was sampled

    def episode(self, member: int, attempt: int) -> EpisodeTask:
        """The queued task of one member."""
        return EpisodeTask(
            episode_id=f"{self.group_id}.{member}",
            group_id=self.group_id,
            member=member,
            attempt=attempt,
            phase=self.phase,
            task=self.tasks[member],
            deadline_unix_s=self.deadline_unix_s,
            timeout_s=self.timeout_s,
        )


class StoredGroups(NamedTuple):
    """Ids of the groups in the store."""

    open_ids: Collection[str]
    sent_ids: Collection[str]  # closed: they wait for the learner, or until a checkpoint covers them


class GroupStore(Protocol):
    """The truth about groups and episodes; every call may be repeated."""

    async def record(self, plans: Sequence[GroupPlan]) -> None:
        """Record groups, in order; those already recorded stay as they are."""
        ...

    async def open_plans(self) -> list[GroupPlan]:
        """All groups not closed yet, with their attempts and settled members."""
        ...

    async def next_group_index(self) -> int:
        """Place in the data order of the first train group never recorded; 0 in an empty store."""
        ...

    async def begin(self, steps: Mapping[str, int], *, defer: bool = False) -> None:
        """Note the optimizer step of the first tokens of open groups; the first note counts.

        `defer`: the new step wins.
        """
        ...

    async def places_kept(self) -> int:
        """Places of the learner's step for which it found no group that it may take; 0: it works."""
        ...

    async def end_training(self, lineage: str) -> None:
        """Ask the learner of this lineage to take no further step."""
        ...

    async def settle(
        self, group_id: str, members: Sequence[int], outcome: Outcome, reason: str
    ) -> None:
        """Settle those of `members` that have not ended."""
        ...

    async def raise_attempt(self, group_id: str, member: int, reason: str) -> int | None:
        """The member's next attempt, or None if it has settled."""
        ...

    async def group_ids(self) -> StoredGroups:
        """Ids of all groups in the store."""
        ...

    async def forget(self, group_id: str, phase: Phase, num_members: int, *, is_sent: bool) -> None:
        """Close a group that is open for the store or for us alone; it is not trained.

        `is_sent`: as far as we know it waits for the learner.
        """
        ...

    async def emit(self, once: str, body: EventBody) -> None:
        """Write an event into the outbox, once for ever under this id."""
        ...

    async def has_model(self) -> bool:
        """Tell whether the learner has written the model card."""
        ...


class EventSource(Protocol):
    """The outbox: every state change of the run, in one order, until it is acknowledged."""

    async def read(self, max_events: int, block_s: float, after: str = "") -> list[Event]:
        """The oldest events after this id that are not acknowledged; the same again until they are."""
        ...

    async def ack(self, seqs: Sequence[str]) -> None:
        """Forget events that were passed on."""
        ...


class EpisodeQueue(Protocol):
    """The durable work queue of episodes."""

    async def provision(self) -> None:
        """Make sure that it exists."""
        ...

    async def missing(self) -> list[str]:
        """Names of the parts of it, and of the run's other streams, that do not exist any more."""
        ...

    async def publish(self, tasks: Sequence[EpisodeTask]) -> None:
        """Return once all are stored; a full queue makes this wait. Repeats are stored once."""
        ...

    async def count(self, phase: Phase) -> int | None:
        """Messages it holds, queued or being played; None if the queue does not exist."""
        ...

    async def held(self, phase: Phase) -> dict[str, EpisodeTask]:
        """Their tasks, by episode id; slow."""
        ...

    async def announce(self, events: Sequence[Event]) -> None:
        """Publish events to those who follow the run; repeating the same batch is stored once."""
        ...


class EventLog(Protocol):
    """`events.jsonl`; writes raise `DiskFullError` and leave it as it was."""

    def lock(self) -> bool:
        """Become the run's only writer; False while another scheduler is."""
        ...

    def follow(self) -> Iterator[Event]:
        """Yields some of another scheduler's events, from the last one yielded on."""
        ...

    def recover(self) -> Iterator[Event]:
        """Yields the events that `follow` has not; `append` is for when the last one has been taken."""
        ...

    def append(self, events: Sequence[Event]) -> list[Event]:
        """Write those that are newer than the last one written; returns them."""
        ...

    def sync(self) -> None:
        """Return once what was written is on the disk; blocks, and runs beside `append`."""
        ...

    def close(self) -> None:
        """Close it."""
        ...


class ReportLog(Protocol):
    """Reports of inference servers that are kept for calibration; never raises."""

    def heard(self, status: ServerStatus) -> None:
        """Take a heartbeat."""
        ...


class MetricsLog(Protocol):
    """`metrics.jsonl`; writes raise `DiskFullError` and leave it as it was."""

    def recover(self, expected: Sequence[Row]) -> None:
        """Make it hold these rows, keeping what it knows of them already."""
        ...

    def append(self, row: Row) -> None:
        """Add the row of the next step."""
        ...

    def rewind(self, step: int) -> None:
        """Take back the rows of later steps."""
        ...

    def close(self) -> None:
        """Close it."""
        ...
