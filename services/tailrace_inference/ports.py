"""What the service needs of an engine, and what an engine tells about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from tailrace_protos.generation import GenerateRequest, TokenChunk


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """A moment of an engine. Counters count since it was made."""

    policy_version: int  # -1 before the first weights
    capacity_tokens: int
    used_tokens: int  # in blocks of running requests
    cached_tokens: int  # in blocks of kept prefixes
    num_running: int
    num_waiting: int
    num_steps: int
    num_computed_tokens: int  # forward tokens of any kind
    num_generated_tokens: int
    num_prompt_tokens: int
    num_prefix_hit_tokens: int  # prompt tokens whose keys and values were reused
    num_recomputed_tokens: int  # computed again after a weight update or a preemption
    num_stale_kv_tokens: int  # sampled over keys and values of an older policy version
    num_preemptions: int
    num_finished: int
    num_nonfinite_logprobs: int


class NamedTensor(Protocol):
    """One tensor of an update: `tailrace.weights.TensorBytes` is one."""

    @property
    def name(self) -> str:
        """Hugging Face parameter name."""

    @property
    def dtype(self) -> str:
        """torch name of the element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes."""

    @property
    def data(self) -> memoryview:
        """The contiguous bytes."""


OnChunk = Callable[[TokenChunk], None]


class Engine(Protocol):
    """Generates tokens in steps that its driver calls; `submit`, `abort` and `stage` may come from
    other threads than `step`, everything else may not run beside it."""

    def attach(self) -> None:
        """Called once on the thread that is going to step, before its first step."""

    def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
        """Queue a request; its chunks, the last one closing it, go to `on_chunk` during steps."""

    def abort(self, call_id: str) -> None:
        """End a call at the next step with what it has; unknown calls are ignored."""

    def abort_all(self) -> None:
        """End every call at the next step."""

    @property
    def base_version(self) -> int:
        """The version that adapters can be staged upon; -1 before a set of weights that has some."""

    def stage(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None = None
    ) -> None:
        """Load weights beside the active ones; `WeightMismatchError` changes nothing.

        They are a full set, or the adapters alone that add to `base_version`.
        """

    def apply(self) -> float:
        """Make the staged weights the active ones between two steps; returns the seconds it took."""

    def pause(self) -> None:
        """Steps do nothing until `resume`."""

    def resume(self) -> None:
        """Steps work again."""

    def has_work(self) -> bool:
        """Whether a step would do something."""

    def step(self) -> bool:
        """One batch forward and what follows from it; False when there was nothing to do."""

    def stats(self) -> EngineStats:
        """The engine at this moment."""
