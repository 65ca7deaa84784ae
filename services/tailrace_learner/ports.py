"""Interfaces that the learner uses; the shared store and weights and `adapters/` implement them."""

from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec, Protocol, TypeVar

from tailrace.weights.tensors import TensorBytes
from tailrace_protos.event import CheckpointSaved, EventBody, ServerQuarantined
from tailrace_protos.trajectory import TrajectoryGroup

P = ParamSpec("P")
T = TypeVar("T")


TakenGroup = tuple[str, int, TrajectoryGroup]
"""A closed group taken from the buffer, after its entry id there and its size in bytes."""


class GroupSource(Protocol):
    """The learner's side of the trajectory buffer."""

    async def next_groups(self, max_groups: int, block_s: float, old_step: int) -> Sequence[TakenGroup]:
        """Returns closed groups, oldest first; after a start all retained ones again.

        Keeps places for open groups whose first tokens are of `old_step` or before.
        """

    @property
    def is_nearly_full(self) -> bool:
        """True if a checkpoint would free a buffer that soon has no room."""

    async def is_training_ended(self, lineage: str) -> bool:
        """Returns whether the scheduler wants no further step of this lineage."""

    async def mark_dropped(self, entry_ids: Sequence[str], reason: str) -> None:
        """Give groups back untrained."""

    async def commit_checkpoint(self, entry_ids: Sequence[str], event: CheckpointSaved) -> None:
        """Delete groups that a durable checkpoint holds."""


class EventSink(Protocol):
    """The outbox."""

    async def emit(self, service: str, *bodies: EventBody, once: str = "") -> None:
        """Append events, all or none; of several calls with one `once` the first alone."""


class VersionReader(Protocol):
    """Reads the record of policy versions."""

    async def of(self, policy_versions: Iterable[int]) -> dict[int, tuple[str, int]]:
        """Returns policy_version -> (lineage, optimizer step) of those that are recorded."""


class WeightSink(Protocol):
    """Takes new weights."""

    async def publish(
        self,
        tensors: Sequence[TensorBytes],
        *,
        lineage: str,
        optimizer_step: int,
        base_version: int | None = None,
    ) -> int:
        """Returns their policy version, once another process holds a verified copy.

        `base_version`: version that they add to; None for whole weights.
        """


class Computer(Protocol):
    """Runs torch beside the event loop, one call at a time."""

    async def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` and return its result."""


class Device(Protocol):
    """The learner's device; if it `is_shared`, inference servers and the learner take turns."""

    is_shared: bool

    async def take(self) -> None:
        """Waits until all servers sleep; does nothing during the learner's turn."""

    async def give(self) -> None:
        """Frees the device's memory and lets the servers compute; does nothing during their turn."""


class OwnDevice:
    """A device of the learner alone."""

    is_shared = False

    async def take(self) -> None:
        """See `Device`."""

    async def give(self) -> None:
        """See `Device`."""


OWN_DEVICE = OwnDevice()


class Ranks(Protocol):
    """The processes that compute one step together. Every rank makes the same calls, in one order."""

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def num_ranks(self) -> int: ...  # noqa: D102

    def sums(self, values: Sequence[float]) -> list[float]:
        """Returns each value summed over the ranks."""

    def collect(self, mine: T) -> list[T]:
        """Returns the objects of all ranks, in the order of ranks."""


class UpdateResult(NamedTuple):
    """Outcome of an update."""

    grad_norm: float  # of the normalised gradient, before clipping
    is_applied: bool  # False: no or non-finite gradient, weights unchanged


class WeightUpdater(Protocol):
    """Updates the weights from gradients that are unnormalised sums."""

    def update(self, *, count: float, learning_rate: float, max_grad_norm: float) -> UpdateResult:
        """Divide the gradients by `count`, clip their norm, update the weights, clear the gradients."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""


StateT = TypeVar("StateT", contravariant=True)
GroupT = TypeVar("GroupT", contravariant=True)


class CheckpointStore(Protocol[StateT]):
    """Durable checkpoints: the learner copies between two passes and writes while training goes on."""

    def write(self, copy: Any, state: StateT) -> Path:
        """Write a checkpoint from a copy; `OSError` with a remedy if the disk refuses it."""

    def prune(self, keep: int, lineages: Container[str]) -> None:
        """Remove all but the `keep` newest of these lineages; 0 keeps all."""


class GroupTrainer(Protocol[GroupT]):
    """Trains one step at a time: `begin`, then `add` groups and `work`, then `finish`."""

    def begin(self, step: int) -> None:
        """Begin a step with the current weights, after `step` finished steps."""

    @property
    def num_missing_groups(self) -> int: ...  # noqa: D102
    @property
    def quarantined(self) -> Sequence[ServerQuarantined]:
        """Servers found wrong in this step; groups added from now on must not have their tokens."""

    def add(self, group: GroupT) -> None:
        """Add a group to the step; `work` computes it."""

    def work(self) -> bool:
        """Do all passes and updates that are worth doing now; False if there were none."""

    def finish(self) -> dict[str, float | None]:
        """Do the rest of the step and return its metrics."""


MetricsRow = dict[str, float | int | None]
"""A line of `metrics.jsonl`: the numbers of a step, null where they are unknown."""


def known_numbers(row: MetricsRow) -> tuple[int, dict[str, float]]:
    """Returns a row's step and its other numbers that are known."""
    step = int(row["step"] or 0)
    return step, {key: value for key, value in row.items() if value is not None and key != "step"}


class Tracker(Protocol):
    """Shows the rows of a run; a new one has none. Constructed as `Class(run, **arguments)`.

    One thread uses it. If a method or the constructor raises, the feed discards the tracker, makes a
    new one after a pause and gives it all rows.
    """

    def write(self, row: MetricsRow) -> None:
        """Take the row of the next step."""

    def flush(self) -> None:
        """Pass on the rows taken so far."""

    def close(self) -> None:
        """Pass on the rows taken so far, and end."""
