"""The calibration's engine and episodes: they do what the simulator does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from benchmarks.calibration.fake_engine import FOLDER_VARIABLE, FakeEngine
from benchmarks.calibration.plans import WORKLOAD, PlanBook
from tailrace_inference.config import InferenceConfig
from tailrace_protos.base import pack_int32
from tailrace_protos.generation import FinishReason, GenerateRequest, TokenChunk
from tailrace_protos.weights import ModelCard

COSTS = {"a_s": 2e-4, "c_s": 1e-7, "d_s": 1e-9, "e_s": 1e-7}


async def started(**costs: float) -> FakeEngine:
    config = InferenceConfig(
        engine="benchmarks.calibration.fake_engine:FakeEngine", engine_args={**COSTS, **costs}
    )
    engine = FakeEngine(ModelCard(b"{}", {}), config)
    await engine.start()
    await engine.stage((), 1)
    await engine.apply()
    return engine


def call(engine: FakeEngine, name: str, num_prompt: int, num_new: int) -> asyncio.Future[TokenChunk]:
    made: asyncio.Future[TokenChunk] = asyncio.get_running_loop().create_future()
    prompt = pack_int32(np.ones(num_prompt, np.int32))
    engine.submit(GenerateRequest(f"{name}/call", name, prompt, num_new), made.set_result)
    return made


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


async def test_a_call_gets_its_tokens_with_their_versions_and_the_next_turn_its_prefix() -> None:
    engine = await started()
    first = call(engine, "a", 100, 400)
    await asyncio.wait_for(call(engine, "b", 10, 100), 60)
    await engine.stage((), 2)
    await engine.apply()
    chunk = await asyncio.wait_for(first, 60)
    assert chunk.finish_reason is FinishReason.LENGTH
    assert [span.policy_version for span in chunk.spans] == [1, 2]
    assert sum(span.num_tokens for span in chunk.spans) == len(chunk.token_ids) // 4 == 400
    assert chunk.spans[0].num_tokens >= 100
    second = await asyncio.wait_for(call(engine, "a", 600, 1), 60)
    assert second.num_cached_tokens == 500
    await engine.close()


async def test_an_aborted_call_ends_with_the_tokens_so_far() -> None:
    engine = await started(a_s=10.0)
    long = call(engine, "a", 100, 400)
    engine.abort("a/call")
    chunk = await asyncio.wait_for(long, 60)
    assert chunk.finish_reason is FinishReason.ABORT
    assert len(chunk.token_ids) // 4 < 400
    assert engine.stats().num_running == 0
    await engine.close()


def test_episodes_of_a_run_are_those_that_the_simulator_draws() -> None:
    rng, book = np.random.default_rng(3), PlanBook(3)
    drawn = [WORKLOAD.draw(rng, 16) for _ in range(3)]
    assert book.of("t00000002.15") == drawn[2][15]
    assert book.of("t00000000-abcd.0") == drawn[0][0]


async def test_a_released_context_is_computed_again() -> None:
    engine = await started()
    for _ in range(2):
        await asyncio.wait_for(call(engine, "a", 100, 50), 60)
    kept = await asyncio.wait_for(call(engine, "a", 150, 1), 60)
    engine.release_prefixes(["a", "unknown"])
    released = await asyncio.wait_for(call(engine, "a", 151, 1), 60)
    assert (kept.num_cached_tokens, released.num_cached_tokens) == (150, 0)
    await engine.close()
