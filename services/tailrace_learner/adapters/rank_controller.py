"""Controller of all ranks in rank 0, and the loop in which the other ranks repeat its commands.

Invariants: rank 0 sends commands from the compute thread alone, one after another. A follower repeats
every command, so that collectives meet. When rank 0 ends, it tells the others, unless a command failed:
then the ranks are out of step, and the launcher ends them all, as after the failure of any rank.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from tailrace.config import RunConfig
from tailrace.weights.tensors import TensorBytes
from tailrace_learner.adapters.ranks import TorchRanks
from tailrace_learner.adapters.snapshots import Snapshot
from tailrace_learner.adapters.strategies.base import Strategy
from tailrace_learner.adapters.worker import OnStep, Worker
from tailrace_learner.config import LearnerConfig
from tailrace_learner.core.algorithms.metrics import Metrics
from tailrace_learner.core.batch.rows import PreparedGroup, TrainingRow


class Command(NamedTuple):
    """A method of the worker and its arguments; an empty method ends the follower."""

    method: str
    arguments: tuple[Any, ...] = ()


_END = Command("")
_BLOCK = 256  # rows of a warm start sent at once
COMMANDS = frozenset(
    [
        "load",
        "restore",
        "begin",
        "add_all",
        "work",
        "finish",
        "weights",
        "snapshot",
        "warm_start",
        "sleep",
        "wake",
    ]
)


class RankController(Worker):
    """The worker of rank 0; what it is told to do, the others do too."""

    def __init__(
        self, run: RunConfig, config: LearnerConfig, strategy: Strategy, ranks: TorchRanks
    ) -> None:
        super().__init__(run, config, strategy)
        self._ranks = ranks
        self._unsent: list[PreparedGroup] = []
        self._in_step = True  # every rank waits for the next command

    def load(self, checkpoint: str) -> None:
        """Load the model on every rank."""
        with self._sending("load", checkpoint):
            super().load(checkpoint)

    def warm_start(self, rows: Iterator[TrainingRow], on_step: OnStep) -> float:
        """Warm-start on every rank, with the rows of rank 0."""
        with self._sending("warm_start"):
            return super().warm_start(self._shared(rows), on_step)

    def restore(self, checkpoint: str) -> None:
        """Restore the optimizer on every rank."""
        with self._sending("restore", checkpoint):
            super().restore(checkpoint)

    def begin(self, step: int) -> None:
        """Begin a step on every rank."""
        with self._sending("begin", step):
            super().begin(step)

    def add(self, group: PreparedGroup) -> None:
        """Add a group to the step; the others get it before their next `work`."""
        super().add(group)
        self._unsent.append(group)

    def work(self) -> bool:
        """Do all passes and updates that are worth doing now, on every rank."""
        groups, self._unsent = self._unsent, []
        with self._sending("add_all", groups), self._sending("work"):
            return super().work()

    def finish(self) -> Metrics:
        """Finish the step on every rank."""
        with self._sending("finish"):
            return super().finish()

    def weights(self, is_whole: bool) -> list[TensorBytes]:
        """Gather the weights to publish."""
        with self._sending("weights", is_whole):
            return super().weights(is_whole)

    def snapshot(self) -> Snapshot:
        """Gather the contents of a checkpoint."""
        with self._sending("snapshot"):
            return super().snapshot()

    def sleep(self) -> None:
        """Move everything to the host on every rank."""
        with self._sending("sleep"):
            super().sleep()

    def wake(self) -> None:
        """Move everything back on every rank."""
        with self._sending("wake"):
            super().wake()

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
        yield from ranks.broadcast(None)
