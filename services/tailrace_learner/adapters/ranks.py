"""Ranks of the learner over `torch.distributed`: sums of numbers, gathered objects, commands.

Three groups: the default group moves weights and gradients (gloo on the CPU, NCCL on GPUs), a second
one (gloo) numbers and objects; both give up after `timeout_s`. Commands have a gloo group of their own:
hours may pass between two commands, so the other ranks wait for rank 0 without limit, but rank 0 waits
for them no longer than `timeout_s`.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from tailrace.config import ConfigError
from tailrace_learner.config import LearnerConfig
from tailrace_learner.config_execution import StrategyArgs
from tailrace_learner.ports import Ranks

T = TypeVar("T")

AGENT_PID = "TAILRACE_LEARNER_AGENT_PID"  # names the agent to its ranks

_COMMAND_TIMEOUT = timedelta(days=365)  # of the other ranks, for the next command


class RankLostError(RuntimeError):
    """A rank has ended or hangs. Attributes: `lost` (the rank, if known), `timeout_s`."""

    def __init__(self, rank: int, lost: str, doing: str, timeout_s: float, reason: str) -> None:
        super().__init__(
            f"rank {rank} of the learner lost {lost} {doing} ({reason}). All ranks end and the learner "
            "goes on from its newest checkpoint. Remedy if nothing hangs and passes just take longer "
            f"than {timeout_s:g} s: raise learner.strategy_args.timeout_s"
        )
        self.lost = lost
        self.timeout_s = timeout_s


class TorchRanks:
    """This process among its ranks. Every method is a collective: all ranks must call it.

    A method raises `RankLostError` if another rank does not call it.
    """

    def __init__(self, args: StrategyArgs, device: torch.device) -> None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit = timedelta(seconds=args.timeout_s)
        distributed.init_process_group(backend, timeout=limit)
        self.rank: int = distributed.get_rank()
        self.num_ranks: int = distributed.get_world_size()
        self._timeout_s = args.timeout_s
        self._values = distributed.new_group(backend="gloo", timeout=limit)
        self._command_timeout = _COMMAND_TIMEOUT if self.rank else limit
        self._commands = distributed.new_group(backend="gloo", timeout=self._command_timeout)

    def sums(self, values: Sequence[float]) -> list[float]:
        """Returns each value summed over the ranks, in float64."""
        total = torch.tensor(list(values), dtype=torch.float64)
        if len(total):
            with self._naming_lost_rank("at a sum"):
                distributed.all_reduce(total, group=self._values)
        sums: list[float] = total.tolist()
        return sums

    def collect(self, mine: T) -> list[T]:
        """Returns the objects of all ranks, in the order of ranks."""
        found: list[Any] = [None] * self.num_ranks
        with self._naming_lost_rank("at a gather"):
            distributed.all_gather_object(found, mine, group=self._values)
        return found

    def broadcast(self, message: Any) -> Any:
        """Returns rank 0's message on every rank; the other ranks wait for it without limit.

        Rank 0 waits until all ranks are ready to receive it, and names those that are missing.
        """
        held = [message]
        with self._naming_lost_rank("at a command"):
            distributed.monitored_barrier(self._commands, self._command_timeout, wait_all_ranks=True)
            distributed.broadcast_object_list(held, src=0, group=self._commands)
        return held[0]

    def leave(self) -> None:
        """End the groups."""
        distributed.destroy_process_group()

    @contextmanager
    def _naming_lost_rank(self, doing: str) -> Iterator[None]:
        """Turn torch's error for a lost rank into `RankLostError`."""
        try:
            yield
        except RuntimeError as error:
            text = str(error)
            lost = _named(text) or ("rank 0" if self.rank else "another rank")
            raise RankLostError(
                self.rank, lost, doing, self._timeout_s, text.partition("\n")[0]
            ) from error


def _named(text: str) -> str:
    """Ranks that torch reports missing at a barrier; empty if it names none."""
    found = re.search(r"Ranks (\d[\d, ]*?) failed to pass", text)
    if found is None:
        return ""
    return f"rank {found[1]}" if found[1].isdigit() else f"ranks {found[1]}"


class DataParallelRanks:
    """Groups of neighbours that compute the same rows together: each counts as one rank."""

    def __init__(self, world: Ranks, group_size: int) -> None:
        self._world = world
        self._group_size = group_size
        self.rank: int = world.rank // group_size
        self.num_ranks: int = world.num_ranks // group_size

    def sums(self, values: Sequence[float]) -> list[float]:
        """Returns each value, the same on all neighbours, summed over the groups."""
        is_first = self._world.rank % self._group_size == 0
        return self._world.sums(values if is_first else [0.0] * len(values))

    def collect(self, mine: T) -> list[T]:
        """Returns the object of the first rank of every group."""
        return self._world.collect(mine)[:: self._group_size]


def pick_device(config: LearnerConfig) -> torch.device:
    """Returns the configured device; `ConfigError` if it does not exist."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("learner.device: torch sees no CUDA device: use cpu or auto")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def launched_rank() -> int | None:
    """Rank set by a launcher (`torchrun` or our own); None in a process without one."""
    rank = os.environ.get("RANK")
    return None if rank is None else int(rank)


def check_launch(args: StrategyArgs) -> None:
    """Raise `ConfigError` if the launcher started another number of ranks than the experiment names."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != args.num_ranks:
        raise ConfigError(
            f"learner.strategy_args.num_ranks is {args.num_ranks}, but the launcher started {started}: "
            "make them equal"
        )


def leave(exit_code: int) -> int:
    """End a rank at once: its threads may wait for ranks that are gone. Other processes return."""
    if launched_rank() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
    return exit_code
