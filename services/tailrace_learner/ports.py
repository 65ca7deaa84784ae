"""What the learner needs; the shared store and weights layers and `adapters/` provide it."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import NamedTuple, ParamSpec, Protocol, TypeVar

from tailrace.weights.tensors import TensorBytes
from tailrace_protos.event import CheckpointSaved, EventBody, ServerQuarantined
from tailrace_protos.trajectory import TrajectoryGroup

P = ParamSpec("P")
T = TypeVar("T")


class Taken(Protocol):
    """A closed group taken from the buffer; `entry_id` is its name there."""

    @property
    def entry_id(self) -> str: ...  # noqa: D102
    @property
    def num_bytes(self) -> int: ...  # noqa: D102
    @property
    def group(self) -> TrajectoryGroup: ...  # noqa: D102


class GroupSource(Protocol):
    """The learner's side of the trajectory buffer."""

    async def next_groups(self, max_groups: int, block_s: float) -> Sequence[Taken]:
        """Closed groups in order; all retained ones again after a start."""
        ...

    async def mark_dropped(self, entry_ids: Sequence[str], reason: str) -> None:
        """Give groups back untrained."""
        ...

    async def commit_checkpoint(self, entry_ids: Sequence[str], event: CheckpointSaved) -> None:
        """Delete groups that a durable checkpoint holds."""
        ...


class EventSink(Protocol):
    """The outbox."""

    async def emit(self, service: str, *bodies: EventBody) -> None:
        """Append events, all or none."""
        ...


class VersionBook(Protocol):
    """What policy versions stand for."""

    async def all(self) -> dict[int, tuple[str, int]]:
        """policy_version -> (lineage, optimizer step)."""
        ...


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
        """Their policy version, once somebody else holds a verified copy.

        `base_version`: what they add to; None: they are whole.
        """
        ...


class Computer(Protocol):
    """Where torch runs: beside the event loop, one call at a time."""

    async def __call__(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """The result of `work`."""
        ...


class Ranks(Protocol):
    """The processes that compute one step together. Every rank makes the same calls, in one order."""

    @property
    def rank(self) -> int: ...  # noqa: D102
    @property
    def num_ranks(self) -> int: ...  # noqa: D102

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks."""
        ...

    def collect(self, mine: T) -> list[T]:
        """What every rank gives, in the order of ranks."""
        ...


class UpdateResult(NamedTuple):
    """What an update did."""

    grad_norm: float  # of the normalised gradient, before clipping
    is_applied: bool  # False: no or non-finite gradient, weights unchanged


class Optimizer(Protocol):
    """Changes the weights by gradients that are unnormalised sums."""

    def update(self, *, count: float, learning_rate: float, max_grad_norm: float) -> UpdateResult:
        """Divide by `count`, bound the norm, change the weights, clear the gradients."""
        ...

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        ...


StateT = TypeVar("StateT", contravariant=True)
GroupT = TypeVar("GroupT", contravariant=True)
CopyT = TypeVar("CopyT")


class CheckpointStore(Protocol[StateT, CopyT]):
    """Durable checkpoints: a copy is taken between two passes, and written while training goes on."""

    def take(self) -> CopyT:
        """A copy on the host of the weights and the optimizer as they are."""
        ...

    def write(self, copy: CopyT, state: StateT) -> Path:
        """Make one of a copy; `OSError` with a remedy when the disk does not take it."""
        ...

    def prune(self, keep: int, lineages: Container[str]) -> None:
        """Remove all but the newest of these lineages; 0 keeps all."""
        ...


class Trainer(Protocol[GroupT]):
    """Trains one step at a time: `begin`, then `add` groups and `work`, then `finish`."""

    def begin(self, step: int) -> None:
        """Start over with the weights as they are, after `step` finished steps."""
        ...

    @property
    def num_missing_groups(self) -> int: ...  # noqa: D102
    @property
    def quarantined(self) -> Sequence[ServerQuarantined]:
        """Servers found wrong in this step; groups added from now on must come without their tokens."""
        ...

    def add(self, group: GroupT) -> None:
        """Take a group into the step; costs nothing until `work`."""
        ...

    def work(self) -> bool:
        """Do all passes and updates that are worth doing now; whether there were any."""
        ...

    def finish(self) -> dict[str, float | None]:
        """What is left of the step, then its metrics."""
        ...


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
        ...

    def flush(self) -> None:
        """Pass on the rows taken so far."""
        ...

    def close(self) -> None:
        """Pass on the rows taken so far, and end."""
        ...


class TrajectoryLog(Protocol):
    """Keeps trained groups for audits."""

    def append(self, step: int, lineage: str, groups: Sequence[TrajectoryGroup]) -> Path:
        """Keep the groups of a step; `OSError` when the disk does not take them."""
        ...
