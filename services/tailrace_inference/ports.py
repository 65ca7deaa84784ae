"""The engine that the service drives, and its statistics."""

from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from tailrace_protos.generation import GenerateRequest, TokenChunk


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of an engine. Counters start at the creation of the engine."""

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
    """One tensor of an update, such as `tailrace.weights.TensorBytes`."""

    @property
    def name(self) -> str:
        """Hugging Face parameter name."""

    @property
    def dtype(self) -> str:
        """torch name of the element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""

    @property
    def data(self) -> memoryview:
        """The contiguous bytes of the elements."""


OnChunk = Callable[[TokenChunk], None]


class Engine(Protocol):
    """Generates tokens in steps, which its driver calls.

    `submit`, `abort`, `abort_all` and `stage` may run in other threads than `step`, all other methods
    may not.
    """

    def attach(self) -> None:
        """Prepares the thread that will step; called once there, before the first step."""

    def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
        """Queues a request. Steps pass its chunks to `on_chunk`; the last chunk closes the call."""

    def abort(self, call_id: str) -> None:
        """Ends a call at the next step with the tokens it has; unknown calls are ignored."""

    def abort_all(self) -> None:
        """Ends all calls at the next step."""

    @property
    def base_version(self) -> int:
        """Policy version to which staged adapters can add; -1 if there is none."""

    def stage(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None = None
    ) -> None:
        """Loads weights beside the active ones; after a `WeightMismatchError` nothing has changed.

        The tensors are a full set, or only the adapters that add to `base_version`.
        """

    def apply(self) -> float:
        """Makes the staged weights active between two steps; returns the seconds of the pause."""

    def pause(self) -> None:
        """Lets steps do nothing until `resume`."""

    def resume(self) -> None:
        """Lets steps work again."""

    def has_work(self) -> bool:
        """True if a step would do something."""

    def step(self) -> bool:
        """Computes one batch and sends what is due; False when there is nothing to do."""

    def stats(self) -> EngineStats:
        """Snapshot of the engine."""
