"""`EngineDriver`: runs the torch engine, in the event loop or on a worker thread.

Invariants: steps and swaps never overlap; chunks reach their callbacks in the event loop, in the
order in which the engine made them; the event loop runs between two steps, so that requests can join;
after a swap or sleep that failed in the middle there is no further step.
A step in the event loop costs no thread switch: best for steps of milliseconds (CPU, small models). A
step in a thread keeps the loop free while a CUDA device computes.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn, Protocol, TypeVar

import msgspec
from tokenizers import Tokenizer

from tailrace.weights.background import in_background
from tailrace_inference import metrics
from tailrace_inference.config import WEIGHTS_DTYPES, InferenceConfig
from tailrace_inference.engine.engine import TorchEngine
from tailrace_inference.ports import (
    EngineFailedError,
    EngineFeatures,
    EngineStats,
    NamedTensor,
    NotStagedError,
    OnChunk,
)
from tailrace_protos.generation import GenerateRequest, TokenChunk
from tailrace_protos.weights import ModelCard

T = TypeVar("T")

_MAX_LOOP_PARAMETERS = 20_000_000  # steps of larger models would block the event loop for too long


_FEATURES = EngineFeatures(
    adapters=True,
    sleep=True,
    engine_args=False,
    releases_prefixes=True,
    weights_dtypes=WEIGHTS_DTYPES,
)


class SteppedEngine(Protocol):
    """An engine that computes only inside `step`; see `TorchEngine`, and `Engine` for the meaning.

    `submit`, `abort`, `abort_all`, `release_prefixes` and `stage` may run in other threads than `step`,
    all other methods may not.
    """

    def attach(self) -> None:
        """Prepares the thread that will step; called once there, before the first step."""

    def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
        """Queues a request; steps pass its chunks to `on_chunk`."""

    def abort(self, call_id: str) -> None:
        """Ends a call at the next step."""

    def abort_all(self) -> None:
        """Ends all calls at the next step."""

    def release_prefixes(self, episode_ids: Sequence[str]) -> None:
        """Frees kept contexts at the next step, after aborts."""

    @property
    def base_version(self) -> int:
        """Policy version to which staged adapters can add."""

    def stage(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None = None
    ) -> None:
        """Loads weights beside the active ones."""

    def apply(self) -> float:
        """Makes the staged weights active between two steps; returns the seconds of the pause."""

    def pause(self) -> None:
        """Lets steps do nothing until `resume`."""

    def resume(self) -> None:
        """Lets steps work again."""

    def sleep(self) -> None:
        """Frees the memory of weights and caches on the device; paused before and after."""

    def wake(self) -> None:
        """Takes the memory again, with the weights; keys and values are computed again."""

    def has_work(self) -> bool:
        """True if a step would do something."""

    def step(self) -> bool:
        """Computes one batch and sends what is due; False when there is nothing to do."""

    def stats(self) -> EngineStats:
        """Snapshot of the engine."""


class EngineDriver:
    """`Engine` that calls the steps of one engine. All methods run in the event loop."""

    def __init__(
        self, engine: SteppedEngine, *, in_thread: bool, features: EngineFeatures = _FEATURES
    ) -> None:
        self.engine = engine
        self.features = features
        self._executor = ThreadPoolExecutor(1, "engine") if in_thread else None
        self._turn = asyncio.Lock()
        self._wake = asyncio.Event()
        self._made: deque[tuple[OnChunk, TokenChunk]] = deque()
        self._steps: asyncio.Task[NoReturn] | None = None
        self._step_s = 0.0
        self._torn: EngineFailedError | None = None  # weights may be of two versions, or gone

    async def start(self) -> None:
        """See `Engine`."""
        self._steps = asyncio.create_task(self._run(), name="engine steps")

    async def watch(self) -> NoReturn:
        """See `Engine`; raises the error of the step that failed."""
        assert self._steps is not None, "not started"
        await asyncio.wait({self._steps})
        self._steps.result()
        raise AssertionError("steps end with an error")

    def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
        """See `Engine`."""
        if self._executor is not None:
            on_chunk = self._deliver_later(on_chunk)
        self.engine.submit(request, on_chunk)
        self._wake.set()

    def abort(self, call_id: str) -> None:
        """See `Engine`."""
        self.engine.abort(call_id)
        self._wake.set()

    def abort_all(self) -> None:
        """See `Engine`."""
        self.engine.abort_all()
        self._wake.set()

    def release_prefixes(self, episode_ids: Sequence[str]) -> None:
        """See `Engine`; nothing is to be done before the next step."""
        self.engine.release_prefixes(episode_ids)

    @property
    def base_version(self) -> int:
        """See `Engine`."""
        return self.engine.base_version

    async def stage(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None = None
    ) -> None:
        """See `Engine`."""
        try:
            await in_background(self.engine.stage, tensors, policy_version, base_version)
        except (MemoryError, RuntimeError) as error:  # the latter from torch
            raise NotStagedError(policy_version, _told(error)) from error

    async def apply(self) -> float:
        """See `Engine`."""
        swap = partial(self._unless_torn, "the swap of the weights", self.engine.apply)
        swap_s = await self._between_steps(swap)
        self._deliver()
        return swap_s

    async def pause(self) -> None:
        """See `Engine`."""
        await self._between_steps(self.engine.pause)

    async def resume(self) -> None:
        """See `Engine`."""
        await self._between_steps(self.engine.resume)

    def allow_sleep(self) -> None:
        """See `Engine`; nothing has to be prepared."""

    async def sleep(self) -> None:
        """See `Engine`."""
        sleep = partial(self._unless_torn, "the release of the device", self.engine.sleep)
        await self._between_steps(sleep)
        self._deliver()

    async def wake(self) -> None:
        """See `Engine`."""
        wake = partial(self._unless_torn, "the return to the device", self.engine.wake)
        await self._between_steps(wake)

    def stats(self) -> EngineStats:
        """See `Engine`."""
        return msgspec.structs.replace(self.engine.stats(), step_s=self._step_s)

    async def close(self) -> None:
        """See `Engine`; does not wait for a step in a thread."""
        if self._steps is not None:
            self._steps.cancel()
            await asyncio.wait({self._steps})
        if self._executor is not None:
            self._executor.shutdown(wait=False)

    async def _run(self) -> NoReturn:
        """Steps until it is cancelled or the engine raises an error."""
        await self._on_engine_thread(self.engine.attach)
        while True:
            while self.engine.has_work():
                async with self._turn:
                    self._check()
                    began_s = time.perf_counter()
                    await self._on_engine_thread(self.engine.step)
                    took_s = time.perf_counter() - began_s
                    metrics.STEP_SECONDS.observe(took_s)
                    self._step_s += took_s
                self._deliver()
                await asyncio.sleep(0)
            self._deliver()
            self._wake.clear()
            self._check()
            if not self.engine.has_work():
                await self._wake.wait()

    def _check(self) -> None:
        if self._torn is not None:
            raise self._torn

    def _unless_torn(self, what: str, work: Callable[[], T]) -> T:
        """Runs work after whose failure there is no further step."""
        try:
            return work()
        except (MemoryError, RuntimeError) as error:
            self._torn = EngineFailedError(f"{what} failed: {_told(error)}")
            raise self._torn from error

    async def _between_steps(self, work: Callable[[], T]) -> T:
        try:
            async with self._turn:
                return await self._on_engine_thread(work)
        finally:
            self._wake.set()

    async def _on_engine_thread(self, work: Callable[[], T]) -> T:
        if self._executor is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def _deliver_later(self, on_chunk: OnChunk) -> OnChunk:
        return lambda chunk: self._made.append((on_chunk, chunk))

    def _deliver(self) -> None:
        """Passes the chunks of the engine's thread to their callbacks."""
        while self._made:
            on_chunk, chunk = self._made.popleft()
            on_chunk(chunk)


def _told(error: Exception) -> str:
    """The error in one line."""
    return f"{type(error).__name__}: {error}".split("\n", 1)[0]


def torch_engine(card: ModelCard, config: InferenceConfig) -> EngineDriver:
    """The torch engine for a model card, not started; raises `EngineRefusalError`."""
    text = card.tokenizer_files.get("tokenizer.json")
    tokenizer = None if text is None else Tokenizer.from_str(text.decode())
    engine = TorchEngine.from_config_json(
        card.config_json, config, tokenizer, merges_adapters=card.trains_adapters
    )
    in_thread = config.step_in == "thread"
    if config.step_in == "auto":
        in_thread = engine.device_type != "cpu" or engine.num_parameters > _MAX_LOOP_PARAMETERS
    has_tokenizer = tokenizer is not None
    features = msgspec.structs.replace(_FEATURES, stop_strings=has_tokenizer, guided=has_tokenizer)
    return EngineDriver(engine, in_thread=in_thread, features=features)
