"""Calls, weights, pause and sleep of engines that compute in steps; a subclass computes.

Invariant: a sleeping engine is paused, and its weights and caches have no memory on the device.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from tailrace.offload import Offload
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.batch import Batch
from tailrace_inference.engine.emitter import Emitter
from tailrace_inference.engine.intake import Intake
from tailrace_inference.engine.row_sampler import RowSampler
from tailrace_inference.engine.weights import Staged, WeightStage
from tailrace_inference.ports import NamedTensor, OnChunk
from tailrace_protos.generation import FinishReason, GenerateRequest


class SteppedBase(ABC):
    """See `SteppedEngine`. A subclass calls `_make_rows` before the first step."""

    max_len: int  # tokens of the longest sequence
    _batch: Batch
    _emitter: Emitter
    _sampler: RowSampler

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

    def _make_rows(self, max_len: int, max_blocks: int, free: Callable[[int], None]) -> None:
        """Makes empty rows. `free` gives the row of an ended call back."""
        config = self._config
        self.max_len = max_len
        self._batch = Batch(config.max_running, max_len, max_blocks, config.stream_chunk_tokens)
        self._emitter = Emitter(
            self._batch, config.stream_chunk_tokens, config.stream_interval_ms / 1000.0
        )
        self._sampler = RowSampler(self._batch, self._emitter, free)

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

    def apply(self) -> float:
        """See `SteppedEngine`."""
        staged = self._staged
        assert staged is not None, "apply without stage"
        began_s = time.perf_counter()
        self._flush(began_s)
        for target, value in zip(staged.targets, staged.values, strict=True):
            target.copy_(value)
        self._on_new_weights(staged.policy_version)
        if self._device.type == "cuda":  # `stage` copies on another stream, perhaps into this memory
            torch.cuda.synchronize(self._device)
        self.policy_version, self._staged = staged.policy_version, None
        return time.perf_counter() - began_s

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
        return can_compute and bool(len(self._batch) or self.num_waiting)

    def step(self) -> bool:
        """See `SteppedEngine`."""
        if not self.has_work():
            return False
        released = self._intake.take_released()  # before aborts, of which each comes before its release
        aborted = self._intake.take_aborts()
        self._intake.read(self.max_len)
        for row in self._intake.end(aborted, self._batch, self._emitter):
            self._sampler.finish(row, self.policy_version, FinishReason.ABORT)
        self._release(released)
        if not self._paused and self.policy_version >= 0:
            self._compute(time.perf_counter())
        return True

    def _flush(self, now_s: float) -> None:
        """Sends the tokens that running calls hold back."""
        self._emitter.flush(self._batch.active(), self.policy_version, now_s)

    @abstractmethod
    def _release(self, episode_ids: Sequence[str]) -> None:
        """Frees the kept contexts of ended episodes."""

    @abstractmethod
    def _compute(self, now_s: float) -> None:
        """Admits waiting calls, gives running ones tokens, and sends what is due."""

    @abstractmethod
    def _on_new_weights(self, policy_version: int) -> None:
        """Reacts to weights that were copied into the model; `policy_version` is theirs."""

    @abstractmethod
    def _forget_computed(self) -> None:
        """Drops all keys and values; running calls are computed again."""

    @abstractmethod
    def _cache_tensors(self) -> Iterable[Tensor]:
        """Tensors of the device that hold keys and values."""
