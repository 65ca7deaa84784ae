"""What the learner needs from the world; the shared store and weights layers and `adapters/` provide it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tailrace_protos.event import CheckpointSaved, EventBody
from tailrace_protos.trajectory import TrajectoryGroup
from tailrace_protos.weights import ModelCard

if TYPE_CHECKING:
    from tailrace.weights.tensors import TensorBytes


class Taken(Protocol):
    """A closed group taken from the buffer; `entry_id` is its name there."""

    @property
    def entry_id(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def group(self) -> TrajectoryGroup: ...


class GroupSource(Protocol):
    """The learner's side of the trajectory buffer."""

    async def next_groups(self, max_groups: int, block_s: float) -> Sequence[Taken]: ...
    async def mark_dropped(self, entry_ids: Sequence[str], reason: str) -> None: ...
    async def commit_checkpoint(self, entry_ids: Sequence[str], event: CheckpointSaved) -> None: ...
    async def rebase_credit(self, num_trained_groups: int) -> None: ...
    def rewind(self) -> None: ...


class EventSink(Protocol):
    """The outbox."""

    async def emit(self, service: str, *bodies: EventBody) -> None: ...


class VersionBook(Protocol):
    """policy_version -> (lineage, optimizer step)."""

    async def all(self) -> dict[int, tuple[str, int]]: ...


class CardStore(Protocol):
    """The run's model card."""

    async def put_model_card(self, card: ModelCard) -> None: ...
    async def get_model_card(self) -> ModelCard | None: ...


class WeightSink(Protocol):
    """Takes new weights; returns their policy version once somebody else holds a verified copy."""

    async def publish(
        self, tensors: Sequence[TensorBytes], *, lineage: str, optimizer_step: int
    ) -> int: ...


class MetricsWriter(Protocol):
    """A place for a step's numbers beside the events."""

    def write(self, step: int, metrics: dict[str, float | None]) -> None: ...


class TrajectoryLog(Protocol):
    """Keeps trained groups for audits."""

    def append(self, step: int, lineage: str, groups: Sequence[TrajectoryGroup]) -> Path: ...
