"""The learner's ranks over `torch.distributed`: numbers summed, objects gathered, commands heard.

Two groups: the default one moves weights and gradients (gloo on the CPU, NCCL on GPUs) and gives up
after `timeout_s`; the control group (gloo) also carries the commands of rank 0, between which hours
may pass.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed

from tailrace.config import ConfigError
from tailrace_learner.config_execution import StrategyArgs
from tailrace_learner.ports import Ranks

T = TypeVar("T")

_PATIENCE = timedelta(days=365)  # between two commands


class TorchRanks:
    """This process among its ranks. Every method is a collective: all ranks must call it."""

    def __init__(self, args: StrategyArgs, device: torch.device) -> None:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(seconds=args.timeout_s))
        self._control = distributed.new_group(backend="gloo", timeout=_PATIENCE)
        self.rank: int = distributed.get_rank()
        self.num_ranks: int = distributed.get_world_size()

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value summed over the ranks, in float64."""
        total = torch.tensor(list(values), dtype=torch.float64)
        if len(total):
            distributed.all_reduce(total, group=self._control)
        sums: list[float] = total.tolist()
        return sums

    def collect(self, mine: T) -> list[T]:
        """What every rank gives, in the order of ranks."""
        found: list[Any] = [None] * self.num_ranks
        distributed.all_gather_object(found, mine, group=self._control)
        return found

    def told(self, message: Any) -> Any:
        """Rank 0's message, on every rank; the others wait for it as long as it takes."""
        held = [message]
        distributed.broadcast_object_list(held, src=0, group=self._control)
        return held[0]

    def leave(self) -> None:
        """End the groups."""
        distributed.destroy_process_group()


class DataParallelRanks:
    """Groups of neighbours that compute the same rows together: each counts as one rank."""

    def __init__(self, world: Ranks, group_size: int) -> None:
        self._world = world
        self._group_size = group_size
        self.rank: int = world.rank // group_size
        self.num_ranks: int = world.num_ranks // group_size

    def sums(self, values: Sequence[float]) -> list[float]:
        """Each value, the same on all neighbours, summed over the groups."""
        is_first = self._world.rank % self._group_size == 0
        return self._world.sums(values if is_first else [0.0] * len(values))

    def collect(self, mine: T) -> list[T]:
        """What the first of every group gives."""
        return self._world.collect(mine)[:: self._group_size]


def launched_rank() -> int | None:
    """Our rank as a launcher set it (`torchrun` or our own); None in a process started by itself."""
    rank = os.environ.get("RANK")
    return None if rank is None else int(rank)


def check_launch(args: StrategyArgs) -> None:
    """Raise `ConfigError` when a launcher started another number of ranks than the experiment says."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if started != args.num_ranks:
        raise ConfigError(
            f"learner.strategy_args.num_ranks is {args.num_ranks}, but the launcher started {started}: "
            "make them equal"
        )
