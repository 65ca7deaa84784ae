"""Engines as the service sees them: they generate on their own and take weights while they do."""

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NoReturn, Protocol

import msgspec

from tailrace_inference.config import KvOnUpdate, WeightsDtype
from tailrace_protos.generation import MAX_TOP_LOGPROBS, GenerateRequest, TokenChunk

OnChunk = Callable[[TokenChunk], None]


class EngineFeatures(msgspec.Struct, frozen=True, kw_only=True):
    """Abilities of an engine. A setting or request that needs more is refused by name."""

    max_top_logprobs: int = MAX_TOP_LOGPROBS
    stop_strings: bool = True
    seeds: Literal["no", "engine", "portable"] = "portable"
    """`engine`: a seed repeats its tokens on one engine. `portable`: also in any batch, on another
    server and after a continuation."""
    guided: bool = False  # replies bound to a grammar
    adapters: bool = False  # updates that hold adapters alone
    kv_on_update: tuple[KvOnUpdate, ...] = ("recompute", "keep")
    prefix_reuse: bool = True  # a turn finds keys and values of the one before
    releases_prefixes: bool = False  # `release_prefixes` has an effect
    cache_salt: bool = False  # prefixes kept apart by policy version; otherwise an update drops them
    speculative: bool = False  # drafts tokens, and counts those that it accepts
    min_p: bool = True
    least_temperature: float = 0.0
    """Smallest temperature above 0 that the package does not replace by another one."""
    weights_dtypes: tuple[WeightsDtype, ...] = ("published", "bfloat16")
    """Types of the tensors that `stage` takes. `float8_e4m3fn`: each such matrix is followed by its
    scales, see `tailrace.weights.target_types`."""
    sleep: bool = False  # its device memory can be given back while it is paused
    engine_args: bool = True  # whether `inference.engine_args` reaches it
    unread_settings: tuple[str, ...] = ()  # keys of `inference` without an effect on this engine


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot of an engine. Counters start at its creation; 0 where an engine does not count."""

    policy_version: int  # -1 before the first weights
    capacity_tokens: int
    max_sequence_tokens: int = 0  # of a prompt and its answer; 0: not known
    used_tokens: int  # in blocks of running requests
    num_running: int
    num_waiting: int
    num_steps: int = 0
    step_s: float = 0.0  # seconds in steps
    num_read_tokens: int = 0  # in the cache for the rows of a step, summed over steps
    cached_tokens: int = 0  # in blocks of kept prefixes
    num_computed_tokens: int = 0  # forward tokens of any kind
    num_generated_tokens: int = 0
    num_prompt_tokens: int = 0
    num_prefix_hit_tokens: int = 0  # prompt tokens whose keys and values were reused
    num_recomputed_tokens: int = 0  # computed again after a weight update or a preemption
    num_stale_kv_tokens: int = 0  # sampled over keys and values of an older policy version
    num_preemptions: int = 0
    num_preempted_tokens: int = 0  # computed again after a preemption; an estimate in other packages
    host_capacity_tokens: int = 0  # of a second cache in host memory, for evicted prefixes
    num_drafted_tokens: int = 0  # speculated ahead of the model
    num_accepted_tokens: int = 0  # of those, the ones that the model's distribution took
    num_finished: int = 0
    num_nonfinite_logprobs: int = 0


class EngineRefusalError(ValueError):
    """The engine cannot run this model or these settings; the message names the remedy."""


class EngineFailedError(RuntimeError):
    """The engine died, or did not answer a control call in time; its process must be restarted."""


class NotStagedError(RuntimeError):
    """An update could not be loaded, for example without memory; the active version stays.

    The same update may succeed later. Attribute: `policy_version`.
    """

    def __init__(self, policy_version: int, reason: str) -> None:
        super().__init__(f"weights of policy version {policy_version} not loaded: {reason}")
        self.policy_version = policy_version


class WeightMismatchError(ValueError):
    """An update does not fit the model; the active version stays. Attribute: `policy_version`."""

    def __init__(self, policy_version: int, reason: str) -> None:
        super().__init__(f"weights of policy version {policy_version} refused: {reason}")
        self.policy_version = policy_version


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


class EngineFollower(Protocol):
    """Node of an engine on several nodes that only computes, between `start` and `close`."""

    async def start(self) -> None:
        """Waits for the leader and begins to compute; raises `EngineRefusalError`."""

    async def watch(self) -> NoReturn:
        """Waits until the leader or a part of this node dies, and raises `EngineFailedError`."""

    async def close(self) -> None:
        """Ends all processes of this node."""


class Engine(Protocol):
    """Generates tokens on its own between `start` and `close`.

    All methods run in one event loop. Those that are asynchronous end within a deadline: they raise
    `EngineFailedError` when the engine does not answer. Each submitted call gets exactly one last
    chunk, unless the engine dies. Nothing is generated before the first `apply`.
    """

    features: EngineFeatures

    async def start(self) -> None:
        """Loads the model; raises `EngineRefusalError`. Called once, before all other methods."""

    async def watch(self) -> NoReturn:
        """Waits until the engine dies or hangs, at most two seconds longer, and raises its error."""

    def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
        """Queues a request; its chunks go to `on_chunk` in the event loop, as they are made.

        A wrong request, or one that needs a feature the engine lacks, gets one chunk with the error.
        """

    def abort(self, call_id: str) -> None:
        """Ends a call soon, with the tokens it has; unknown calls are ignored."""

    def abort_all(self) -> None:
        """Ends all calls soon."""

    def release_prefixes(self, episode_ids: Sequence[str]) -> None:
        """Frees the kept contexts of these episodes before those of others; unknown ones are ignored.

        Running calls, and prompts that other episodes share, stay. Called only with
        `features.releases_prefixes`.
        """

    @property
    def base_version(self) -> int:
        """Policy version to which staged adapters can add; -1 if there is none."""

    async def stage(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None = None
    ) -> None:
        """Loads weights beside the active ones, during generation.

        The tensors are a full set, or only the adapters that add to `base_version`. Their bytes may be
        released afterwards. After a `WeightMismatchError` or `NotStagedError` nothing has changed.
        """

    async def apply(self) -> float:
        """Makes the staged weights active between two tokens; returns the seconds of the pause.

        Raises `EngineRefusalError` if the first weights show that the engine cannot run the model.
        After an `EngineFailedError` parts of two versions may be active, and nothing more is generated.
        """

    async def pause(self) -> None:
        """Holds all calls, with their tokens, until `resume`."""

    async def resume(self) -> None:
        """Goes on with all calls."""

    def allow_sleep(self) -> None:
        """Prepares for `sleep` and `wake` (`features.sleep`). Called before `start` or never."""

    async def sleep(self) -> None:
        """Frees the device memory of weights, keys and values; called between `pause` and `resume`."""

    async def wake(self) -> None:
        """Takes the memory again, with the same weights; keys and values are computed again."""

    def stats(self) -> EngineStats:
        """Snapshot of the engine, at most some steps old."""

    async def close(self) -> None:
        """Releases the engine, without a last chunk for calls that are still open."""
