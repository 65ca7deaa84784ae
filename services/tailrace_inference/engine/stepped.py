"""Calls, weights, pause and sleep of engines that compute in steps; what a step computes is theirs.

Invariant: a sleeping engine is paused, and its weights and caches have no memory on the device.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tailrace.offload import Offload
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.intake import Intake
from tailrace_inference.engine.weights import Staged, WeightStage
from tailrace_inference.ports import NamedTensor, OnChunk
from tailrace_protos.generation import GenerateRequest


class SteppedBase(ABC):
    """See `SteppedEngine`."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        vocab_size: int,
        config: InferenceConfig,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._config = config
        self._device = device
        self._intake = Intake(config.max_waiting, vocab_size, tokenizer)
        self._weights = WeightStage(model)
        self._staged: Staged | None = None
        self._paused = False
        self._offload = Offload()
        self.policy_version = -1

    def attach(self) -> None:
        """See `SteppedEngine`. torch keeps its number of threads for each calling thread."""
        if self._device.type == "cpu":
            torch.set_num_threads(self._config.num_threads)

    def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
        """See `SteppedEngine`."""
        self._intake.submit(request, on_chunk)

    def abort(self, call_id: str) -> None:
        """See `SteppedEngine`."""
        self._intake.abort(call_id)

    def abort_all(self) -> None:
        """See `SteppedEngine`."""
        self._intake.abort(None)

    def release_prefixes(self, episode_ids: Sequence[str]) -> None:
        """See `SteppedEngine`."""
        self._intake.release(episode_ids)

    @property
    def base_version(self) -> int:
        """See `SteppedEngine`."""
        return self._weights.base_version

    @property
    def num_waiting(self) -> int:
        """Calls without a row."""
        return self._intake.num_waiting

    def stage(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None = None
    ) -> None:
        """See `SteppedEngine`."""
        self._staged = self._weights.load(tensors, policy_version, base_version)

    def pause(self) -> None:
        """See `SteppedEngine`."""
        self._paused = True

    def resume(self) -> None:
        """See `SteppedEngine`."""
        self._paused = False

    def sleep(self) -> None:
        """See `SteppedEngine`."""
        assert self._paused, "sleep without pause"
        self._forget_computed()
        self._offload.free(self._weights.tensors(), keep=True)
        self._offload.free(self._cache_tensors(), keep=False)

    def wake(self) -> None:
        """See `SteppedEngine`."""
        self._offload.restore()

    def has_work(self) -> bool:
        """See `SteppedEngine`."""
        if self._intake.has_aborts:
            return True
        can_compute = not self._paused and self.policy_version >= 0
        return can_compute and bool(self._num_running() or self.num_waiting)

    @abstractmethod
    def _num_running(self) -> int:
        """Calls with a row."""

    @abstractmethod
    def _forget_computed(self) -> None:
        """Drops all keys and values; running calls are computed again."""

    @abstractmethod
    def _cache_tensors(self) -> Iterable[Tensor]:
        """Tensors of the device that hold keys and values."""
