"""The driver with a fake engine, in the loop and on a thread; the local policy with a real one."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tailrace.sdk.policy import GenerationFailedError, TurnRequest
from tailrace_inference.adapters.local_policy import LocalPolicy
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.checkpoint import CheckpointError, engine_from_checkpoint
from tailrace_inference.engine.driver import EngineDriver, SteppedEngine
from tailrace_inference.handlers import InferenceHandler
from tailrace_inference.ports import (
    EngineFailedError,
    EngineStats,
    NamedTensor,
    NotStagedError,
    OnChunk,
)
from tailrace_protos.base import as_int32, pack_int32
from tailrace_protos.control import ServerState
from tailrace_protos.generation import (
    CallErrorCode,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenChunk,
)
from tests.unit.tailrace_inference.harness import Client, make_engine, make_model, own_logprobs


class FakeEngine:
    """Answers a request with one token per step, from its prompt; breaks on the prompt [13]."""

    def __init__(self) -> None:
        self.error: Exception | None = None  # of the next update
        self.threads: set[int] = set()
        self.left: dict[str, tuple[list[int], OnChunk]] = {}
        self.applied_on: int | None = None

    def attach(self) -> None:
        self.threads.add(threading.get_ident())

    def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
        self.left[request.call_id] = (as_int32(request.prompt_ids).tolist(), on_chunk)

    def abort(self, call_id: str) -> None:
        if call_id in self.left:
            self.left[call_id][0].clear()

    def abort_all(self) -> None:
        for ids, _ in self.left.values():
            ids.clear()

    def release_prefixes(self, episode_ids: Sequence[str]) -> None:
        """No context is kept."""

    base_version = -1

    def stage(
        self, tensors: Iterable[NamedTensor], policy_version: int, base_version: int | None = None
    ) -> None:
        if self.error is not None:
            raise self.error

    def apply(self) -> float:
        if self.error is not None:
            raise self.error
        self.applied_on = threading.get_ident()
        return 0.25

    def pause(self) -> None:
        raise NotImplementedError

    def resume(self) -> None:
        raise NotImplementedError

    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> bool:
        self.threads.add(threading.get_ident())
        for call_id, (ids, on_chunk) in list(self.left.items()):
            if ids == [13]:
                raise RuntimeError("broken")
            token = pack_int32([ids.pop(0)]) if ids else memoryview(b"")
            reason = None if ids else FinishReason.LENGTH
            if reason is not None:
                del self.left[call_id]
            on_chunk(TokenChunk(call_id, token, finish_reason=reason))
        return True

    def stats(self) -> EngineStats:
        raise NotImplementedError


class Sink:
    """Notes chunks and the thread they came on."""

    def __init__(self) -> None:
        self.chunks: list[TokenChunk] = []
        self.ended = asyncio.Event()

    def send(self, chunk: TokenChunk) -> None:
        assert asyncio.get_running_loop() is not None
        self.chunks.append(chunk)
        if chunk.finish_reason is not None or chunk.error is not None:
            self.ended.set()

    @property
    def ids(self) -> list[int]:
        return [i for chunk in self.chunks for i in as_int32(chunk.token_ids).tolist()]


def driven(engine: SteppedEngine) -> EngineDriver:
    return EngineDriver(engine, in_thread=False)


def request(call_id: str, ids: list[int]) -> GenerateRequest:
    return GenerateRequest(call_id, f"{call_id}.episode", pack_int32(ids), 100)


@pytest.fixture(params=["loop", "thread"])
async def driver(request: pytest.FixtureRequest) -> AsyncIterator[EngineDriver]:
    made = EngineDriver(FakeEngine(), in_thread=request.param == "thread")
    await made.start()
    yield made
    await made.close()


async def test_chunks_come_in_order_in_the_loop_wherever_steps_run(driver: EngineDriver) -> None:
    sinks = [Sink() for _ in range(5)]
    for index, sink in enumerate(sinks):
        driver.submit(request(str(index), list(range(index + 1))), sink.send)
    await asyncio.gather(*(sink.ended.wait() for sink in sinks))
    assert [sink.ids for sink in sinks] == [list(range(index + 1)) for index in range(5)]
    assert isinstance(driver.engine, FakeEngine)
    assert len(driver.engine.threads) == 1
    assert await driver.apply() == 0.25
    assert driver.engine.applied_on in driver.engine.threads


async def test_idle_and_busy_seconds_sum_to_the_time_since_the_start(driver: EngineDriver) -> None:
    began_s = time.monotonic()
    handler = InferenceHandler(driver, lambda: False)
    handler.has_weights = True
    sink = Sink()
    handler.submit(request("a", [1] * 50), sink)
    await sink.ended.wait()
    await asyncio.sleep(0.02)
    idle_s, busy_s = handler.idle_s, handler.busy_s
    assert idle_s >= 0.019
    assert busy_s > 0
    assert idle_s + busy_s <= time.monotonic() - began_s


async def test_a_broken_engine_ends_the_driver_and_every_call_is_told() -> None:
    driver = EngineDriver(FakeEngine(), in_thread=False)
    draining = asyncio.Event()
    handler = InferenceHandler(driver, draining.is_set)
    handler.has_weights = True
    sinks = {name: Sink() for name in ("good", "bad")}
    handler.submit(request("good", [1] * 1000), sinks["good"])
    handler.submit(request("bad", [13]), sinks["bad"])
    await driver.start()
    with pytest.raises(RuntimeError, match="broken"):
        await driver.watch()
    handler.fail_all("the engine failed")
    for sink in sinks.values():
        assert sink.chunks[-1].error is not None
        assert sink.chunks[-1].error.code is CallErrorCode.INTERNAL
    assert (handler.num_failed, handler.num_open) == (2, 0)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("out of memory\nwith a long trace")])
async def test_an_update_that_cannot_be_loaded_changes_nothing(
    driver: EngineDriver, error: Exception
) -> None:
    assert isinstance(driver.engine, FakeEngine)
    driver.engine.error = error
    with pytest.raises(NotStagedError, match=f"version 7 not loaded: {type(error).__name__}") as told:
        await driver.stage([], 7)
    assert "\n" not in str(told.value)
    driver.engine.error = None
    await driver.stage([], 7)
    assert await driver.apply() == 0.25
    sink = Sink()
    driver.submit(request("a", [1, 2]), sink.send)
    await sink.ended.wait()
    assert sink.ids == [1, 2]


async def test_after_a_swap_that_failed_in_the_middle_no_token_is_computed(
    driver: EngineDriver,
) -> None:
    assert isinstance(driver.engine, FakeEngine)
    driver.engine.error = RuntimeError("half of it is copied")
    sink = Sink()
    with pytest.raises(EngineFailedError, match="half of it is copied"):
        await driver.apply()
    driver.submit(request("a", [1, 2]), sink.send)
    with pytest.raises(EngineFailedError, match="half of it is copied"):
        async with asyncio.timeout(60):
            await driver.watch()
    assert sink.chunks == []


async def test_only_a_ready_server_takes_calls() -> None:
    driver = EngineDriver(FakeEngine(), in_thread=False)
    draining = asyncio.Event()
    handler = InferenceHandler(driver, draining.is_set)

    def answer() -> TokenChunk | None:
        sink = Sink()
        handler.submit(request("a", [1]), sink)
        return sink.chunks[0] if sink.chunks else None

    starting = answer()
    handler.has_weights = True
    assert handler.state is ServerState.READY
    assert answer() is None
    draining.set()
    leaving = answer()
    for refusal, word in ((starting, "starting"), (leaving, "draining")):
        assert refusal is not None
        assert refusal.error is not None
        assert refusal.error.code is CallErrorCode.NOT_READY
        assert word in refusal.error.reason


async def test_the_local_policy_passes_tokens_on_as_they_come(tmp_path: Path) -> None:
    make_model().save_pretrained(tmp_path)
    chunks: list[TokenChunk] = []
    config = InferenceConfig(max_running=4, kv_cache_tokens=1024, stream_chunk_tokens=2)
    async with LocalPolicy(driven(engine_from_checkpoint(tmp_path, config))) as policy:
        made = await policy.generate(
            TurnRequest(pack_int32([1, 2, 3]), 5, SamplingParams(seed=1), "e", 0, chunks.append)
        )
    streamed = [as_int32(chunk.token_ids).tolist() for chunk in chunks]
    assert [one for part in streamed for one in part] == made.token_ids.tolist()
    assert len(streamed) > 1
    assert [] not in streamed


async def test_the_local_policy_plays_turns_in_this_process(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path)
    config = InferenceConfig(max_running=4, kv_cache_tokens=1024)
    sampling = SamplingParams(seed=1)
    async with LocalPolicy(driven(engine_from_checkpoint(tmp_path, config))) as policy:
        first = await policy.generate(TurnRequest(pack_int32([1, 2, 3]), 5, sampling, "e", 0))
        ids = [1, 2, 3, *first.token_ids.tolist(), 9]
        second = await policy.generate(TurnRequest(pack_int32(ids), 5, sampling, "e", 1))
        with pytest.raises(GenerationFailedError, match="prompt_ids"):
            await policy.generate(TurnRequest(pack_int32([]), 5, sampling, "e", 2))
    assert second.num_cached_tokens == 7
    expected = own_logprobs(model, [*ids, *second.token_ids.tolist()])[len(ids) - 1 :]
    assert second.inference_logprobs.tolist() == pytest.approx(expected.tolist(), abs=1e-4)


async def test_a_broken_engine_raises_in_the_local_policy() -> None:
    async with LocalPolicy(driven(FakeEngine())) as policy:
        with pytest.raises(RuntimeError, match="broken"):
            await policy.generate(TurnRequest(pack_int32([13]), 5, SamplingParams(), "e", 0))


async def test_a_cancelled_caller_aborts_its_call() -> None:
    engine = make_engine(make_model())
    async with LocalPolicy(driven(engine)) as policy:
        endless = policy.generate(TurnRequest(pack_int32([1]), 200, SamplingParams(), "e", 0))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(endless, 0.02)
        while engine.has_work():
            await asyncio.sleep(0)
        stats = engine.stats()
    assert stats.num_finished == 1
    assert stats.num_running == 0


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it has no config"):
        engine_from_checkpoint(tmp_path, InferenceConfig())


def test_a_folder_without_some_weights_is_refused(tmp_path: Path) -> None:
    """Random ones would take their place."""
    make_model("llama").model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"lacks the weights of lm_head\.weight.*random"):
        engine_from_checkpoint(tmp_path, InferenceConfig())


def test_a_folder_with_a_weight_of_another_shape_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"down_proj\.weight of shape \(32, 48\)"):
        engine_from_checkpoint(tmp_path, InferenceConfig())


@pytest.mark.parametrize(
    "keys", [{"attn_implementation": "flash_attention_2"}, {"tie_word_embeddings": True}]
)
def test_a_folder_is_read_as_the_learner_reads_it(keys: dict[str, Any], tmp_path: Path) -> None:
    """With its own attention, and with its own output matrix if it holds one."""
    model = saved(tmp_path, **keys)
    client = Client(engine_from_checkpoint(tmp_path, InferenceConfig(max_running=4)))
    asked = client.one([1, 2, 3], 5)
    expected = own_logprobs(model, asked.ids)[2:].tolist()
    assert asked.generation.inference_logprobs.tolist() == pytest.approx(expected, abs=1e-4)


def saved(folder: Path, **keys: Any) -> Any:
    """A saved model whose configuration then says something else."""
    model = make_model("llama")
    model.save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))
    return model


@pytest.mark.parametrize("step", ["sleep", "wake"])
async def test_after_a_sleep_that_failed_in_the_middle_no_token_is_computed(
    driver: EngineDriver, step: str
) -> None:
    """Its weights may be gone; its calls are held, and would wait for ever."""

    def fail() -> None:
        raise RuntimeError("CUDA out of memory")

    setattr(driver.engine, step, fail)
    with pytest.raises(EngineFailedError, match="failed: RuntimeError: CUDA out of memory"):
        await getattr(driver, step)()
    with pytest.raises(EngineFailedError, match="out of memory"):
        async with asyncio.timeout(60):
            await driver.watch()


async def test_a_call_that_an_engine_cannot_begin_is_not_open() -> None:
    """It would be waited for at each drain."""

    class Refusing(EngineDriver):
        def submit(self, request: GenerateRequest, on_chunk: OnChunk) -> None:
            raise KeyError("a bug in an engine of a user")

    handler = InferenceHandler(Refusing(FakeEngine(), in_thread=False), lambda: False)
    handler.has_weights = True
    with pytest.raises(KeyError):
        handler.submit(request("a", [1]), Sink())
    assert handler.num_open == 0
    async with asyncio.timeout(60):
        await handler.finish(60.0)
