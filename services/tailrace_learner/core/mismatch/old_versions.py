"""Weights that the last steps began with, for forwards under them.

Each rank keeps its own shards on the host in their own precision: `num_versions` times what the
trained weights (of adapters: only these) take on this rank. A forward under them exchanges them with
the model's, one tensor after the other, so the device needs room for one more tensor.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from tailrace_learner.core.model.shards import local


class OldVersions:
    """Weights by the number of steps that were done when they were the learner's."""

    def __init__(self, parameters: list[nn.Parameter], num_versions: int) -> None:
        self._parameters = parameters
        self._num_versions = num_versions
        self._kept: dict[int, list[Tensor]] = {}  # by step

    def has(self, step: int) -> bool:
        """Tells whether the weights of `step` are kept."""
        return step in self._kept

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Copies the current weights, those of `step`, into the memory of the oldest copy."""
        if not self._num_versions or step in self._kept:
            return
        if len(self._kept) < self._num_versions:
            copies = [_on_host(shard) for shard in self._shards()]
        else:
            copies = self._kept.pop(min(self._kept))
        for copy, shard in zip(copies, self._shards(), strict=True):
            copy.copy_(shard)
        self._kept[step] = copies

    @contextmanager
    def restored(self, step: int) -> Iterator[None]:
        """Puts the weights of `step` into the model, for forwards without gradient."""
        self._exchange(step)
        try:
            yield
        finally:
            self._exchange(step)

    @torch.no_grad()
    def _exchange(self, step: int) -> None:
        for copy, shard in zip(self._kept[step], self._shards(), strict=True):
            # In place: code that gathers a shard, or has a view of a weight, reads its memory.
            now = shard.clone()
            shard.copy_(copy)
            copy.copy_(now)

    def _shards(self) -> Iterator[Tensor]:
        return (local(parameter).detach() for parameter in self._parameters)


def _on_host(shard: Tensor) -> Tensor:
    """Allocates memory for a copy; pinned for a CUDA tensor, which copies several times as fast."""
    return torch.empty(shard.shape, dtype=shard.dtype, device="cpu", pin_memory=shard.is_cuda)
