"""Rank 0's way to have all ranks do the same, and the loop in which the others do it.

Invariants: commands are given on the compute thread alone, one after another; a follower repeats every
one of them, so that collectives meet; when rank 0 ends, it tells the others, unless a command failed:
then ranks are out of step, and rank 0's launcher ends them all, as when any other rank fails.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from tailrace.log import get_logger
from tailrace.weights.tensors import TensorBytes
from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.snapshots import Snapshot
from tailrace_learner.adapters.worker import OnStep, Worker
from tailrace_learner.core.batch.rows import PreparedGroup, Row
from tailrace_learner.core.step.run_state import ReferenceState
from tailrace_learner.core.step.step import Metrics
from tailrace_protos.event import ServerQuarantined
from tailrace_protos.weights import ModelCard

log = get_logger(__name__)


class Command(NamedTuple):
    """A method of the worker and what it is called with; no method: the end."""

    method: str
    arguments: tuple[Any, ...] = ()


_END = Command("")
_BLOCK = 256  # rows of a warm start told at once
COMMANDS = frozenset(
    {"load", "restore", "begin", "add_all", "work", "finish", "weights", "snapshot", "warm_start"}
)


class LeaderGoneError(RuntimeError):
    """Rank 0 ended the team in the middle of something."""


class Team:
    """The worker of rank 0 with all its mirrors; offers what a trainer offers."""

    def __init__(self, worker: Worker, ranks: TorchRanks) -> None:
        self._worker = worker
        self._ranks = ranks
        self._untold: list[PreparedGroup] = []
        self._in_step = True  # every rank waits for the next command

    @property
    def card(self) -> ModelCard:
        """What others need to know of the model."""
        return self._worker.card

    @property
    def num_parameters(self) -> int:
        """Trained parameters of the whole model."""
        return self._worker.num_parameters

    @property
    def reference(self) -> ReferenceState | None:
        """Which weights the reference model has, once all is restored."""
        return self._worker.reference

    def load(self, checkpoint: str) -> None:
        """Load the model on every rank."""
        with self._telling("load", checkpoint):
            self._worker.load(checkpoint)

    def warm_start(self, rows: Iterator[Row], on_step: OnStep) -> float:
        """Warm-start on every rank, with rows that rank 0 makes."""
        with self._telling("warm_start"):
            return self._worker.warm_start(self._shared(rows), on_step)

    def restore(self, checkpoint: str) -> None:
        """Restore the optimizer on every rank."""
        with self._telling("restore", checkpoint):
            self._worker.restore(checkpoint)

    def begin(self, step: int) -> None:
        """Begin a step on every rank."""
        with self._telling("begin", step):
            self._worker.begin(step)

    @property
    def num_missing_groups(self) -> int:
        """Groups that the step still needs."""
        return self._worker.num_missing_groups

    @property
    def quarantined(self) -> Sequence[ServerQuarantined]:
        """Servers found wrong in this step, the same by all ranks."""
        return self._worker.quarantined

    def add(self, group: PreparedGroup) -> None:
        """Take a group into the step; the others hear of it before they work."""
        self._worker.add(group)
        self._untold.append(group)

    def work(self) -> bool:
        """Do on every rank what is worth doing now."""
        told, self._untold = self._untold, []
        with self._telling("add_all", told), self._telling("work"):
            return self._worker.work()

    def finish(self) -> Metrics:
        """Finish the step on every rank."""
        with self._telling("finish"):
            return self._worker.finish()

    def weights(self, is_whole: bool) -> list[TensorBytes]:
        """Gather the weights to publish."""
        with self._telling("weights", is_whole):
            return self._worker.weights(is_whole)

    def snapshot(self) -> Snapshot:
        """Gather what a checkpoint holds."""
        with self._telling("snapshot"):
            return self._worker.snapshot()

    def end(self) -> None:
        """Tell the others to end."""
        if self._in_step:
            self._ranks.told(_END)
            self._ranks.leave()

    @contextmanager
    def _telling(self, method: str, *arguments: Any) -> Iterator[None]:
        """Give the command to the others, and notice when ranks fall out of step in it."""
        assert method in COMMANDS
        self._in_step = False  # until it is done: whatever fails in it leaves other ranks waiting
        self._ranks.told(Command(method, arguments))
        yield
        self._in_step = True

    def _shared(self, rows: Iterator[Row]) -> Iterator[Row]:
        while block := list(islice(rows, _BLOCK)):
            yield from self._ranks.told(block)


def follow(worker: Worker, ranks: TorchRanks) -> None:
    """Repeat what rank 0 does until it ends."""
    while (command := ranks.told(None)) != _END:
        assert command.method in COMMANDS
        if command.method == "warm_start":
            worker.warm_start(_heard(ranks), lambda step, loss: None)
        else:
            getattr(worker, command.method)(*command.arguments)
    ranks.leave()


def _heard(ranks: TorchRanks) -> Iterator[Row]:
    """Rows as rank 0 makes them."""
    while True:
        block = ranks.told(None)
        if block == _END:
            raise LeaderGoneError("rank 0 ended during the warm start")
        yield from block
