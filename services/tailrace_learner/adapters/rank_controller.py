"""Controller of all ranks in rank 0, and the loop in which the other ranks repeat its commands.

Invariants: rank 0 sends commands from the compute thread alone, one after another. A follower repeats
every command, so that collectives meet. When rank 0 ends, it tells the others, unless a command failed:
then the ranks are out of step, and the launcher ends them all, as after the failure of any rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from tailrace.log import get_logger
from tailrace.weights.tensors import TensorBytes
from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.snapshots import Snapshot
from tailrace_learner.adapters.worker import OnStep, Worker
from tailrace_learner.core.algorithms.metrics.base import Metrics
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow
from tailrace_learner.core.model.forward_path import ForwardPath
from tailrace_learner.core.step.run_state import ReferenceState
from tailrace_protos.event import ServerQuarantined
from tailrace_protos.weights import ModelCard

log = get_logger(__name__)


class Command(NamedTuple):
    """A method of the worker and its arguments; an empty method ends the follower."""

    method: str
    arguments: tuple[Any, ...] = ()


_END = Command("")
_BLOCK = 256  # rows of a warm start sent at once
COMMANDS = frozenset(
    {"load", "restore", "begin", "add_all", "work", "finish", "weights", "snapshot", "warm_start"}
)


class LeaderGoneError(RuntimeError):
    """Rank 0 ended in the middle of a command."""


class RankController:
    """The worker of rank 0 with all its mirrors; has the interface of a trainer."""

    def __init__(self, worker: Worker, ranks: TorchRanks) -> None:
        self._worker = worker
        self._ranks = ranks
        self._unsent: list[PreparedGroup] = []
        self._in_step = True  # every rank waits for the next command

    @property
    def card(self) -> ModelCard:
        """Card of the model for the other services."""
        return self._worker.card

    @property
    def path(self) -> ForwardPath:
        """Way of rows through the model."""
        return self._worker.path

    @property
    def num_parameters(self) -> int:
        """Trained parameters of the whole model."""
        return self._worker.num_parameters

    @property
    def reference(self) -> ReferenceState | None:
        """Weights of the reference model, once `restore` has run."""
        return self._worker.reference

    def load(self, checkpoint: str) -> None:
        """Load the model on every rank."""
        with self._sending("load", checkpoint):
            self._worker.load(checkpoint)

    def warm_start(self, rows: Iterator[TrainingRow], on_step: OnStep) -> float:
        """Warm-start on every rank, with the rows of rank 0."""
        with self._sending("warm_start"):
            return self._worker.warm_start(self._shared(rows), on_step)

    def restore(self, checkpoint: str) -> None:
        """Restore the optimizer on every rank."""
        with self._sending("restore", checkpoint):
            self._worker.restore(checkpoint)

    def begin(self, step: int) -> None:
        """Begin a step on every rank."""
        with self._sending("begin", step):
            self._worker.begin(step)

    @property
    def num_missing_groups(self) -> int:
        """Groups that the step still needs."""
        return self._worker.num_missing_groups

    @property
    def quarantined(self) -> Sequence[ServerQuarantined]:
        """Servers found wrong in this step; all ranks agree."""
        return self._worker.quarantined

    def add(self, group: PreparedGroup) -> None:
        """Add a group to the step; the others get it before their next `work`."""
        self._worker.add(group)
        self._unsent.append(group)

    def work(self) -> bool:
        """Do all passes and updates that are worth doing now, on every rank."""
        groups, self._unsent = self._unsent, []
        with self._sending("add_all", groups), self._sending("work"):
            return self._worker.work()

    def finish(self) -> Metrics:
        """Finish the step on every rank."""
        with self._sending("finish"):
            return self._worker.finish()

    def weights(self, is_whole: bool) -> list[TensorBytes]:
        """Gather the weights to publish."""
        with self._sending("weights", is_whole):
            return self._worker.weights(is_whole)

    def snapshot(self) -> Snapshot:
        """Gather the contents of a checkpoint."""
        with self._sending("snapshot"):
            return self._worker.snapshot()

    def end(self) -> None:
        """End the other ranks."""
        if self._in_step:
            self._ranks.broadcast(_END)
            self._ranks.leave()

    @contextmanager
    def _sending(self, method: str, *arguments: Any) -> Iterator[None]:
        """Send the command to the others, and record if it fails and leaves ranks out of step."""
        assert method in COMMANDS
        self._in_step = False  # until it is done: a failure leaves other ranks waiting
        self._ranks.broadcast(Command(method, arguments))
        yield
        self._in_step = True

    def _shared(self, rows: Iterator[TrainingRow]) -> Iterator[TrainingRow]:
        while block := list(islice(rows, _BLOCK)):
            yield from self._ranks.broadcast(block)


def follow(worker: Worker, ranks: TorchRanks) -> None:
    """Repeat the commands of rank 0 until it ends."""
    while (command := ranks.broadcast(None)) != _END:
        assert command.method in COMMANDS
        if command.method == "warm_start":
            worker.warm_start(_received(ranks), lambda step, loss: None)
        else:
            getattr(worker, command.method)(*command.arguments)
    ranks.leave()


def _received(ranks: TorchRanks) -> Iterator[TrainingRow]:
    """Rows of the warm start, as rank 0 sends them."""
    while True:
        block = ranks.broadcast(None)
        if block == _END:
            raise LeaderGoneError("rank 0 ended during the warm start")
        yield from block
