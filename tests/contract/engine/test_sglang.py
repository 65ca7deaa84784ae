"""SGLang itself: traps of its streams and its sampler, refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tailrace.config import ConfigError
from tailrace_inference.adapters.engines import start_engine
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import EngineFailedError
from tailrace_protos.generation import CallErrorCode, FinishReason
from tests.contract.engine.harness import (
    ENGINE,
    LONG,
    TOLERANCE,
    Bench,
    all_ended,
    make_card,
    weights_of,
)

pytestmark = [
    pytest.mark.skipif(ENGINE != "sglang", reason="run by make test-engines"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with await Bench.start(max_running=64) as made:
        yield made


async def test_an_abort_ends_no_call_whose_id_begins_with_the_same_letters(bench: Bench) -> None:
    many = [bench.ask([3, 4, 5], 60) for _ in range(12)]  # the engine's first ones: 1, 10, 11, 12
    bench.engine.abort(many[0].request.call_id)
    await all_ended(many)
    assert many[0].generation.finish_reason is FinishReason.ABORT
    assert {asked.generation.num_tokens for asked in many[1:]} == {60}


async def test_a_call_aborted_while_the_engine_is_held_repeats_no_token(bench: Bench) -> None:
    """SGLang repeats the last token of a call that it aborts in its queue, as those of a swap are."""
    held = [bench.ask([3, 4, 5], LONG) for _ in range(8)]
    for asked in held:
        await asked.begun.wait()
    before = bench.model
    await bench.engine.pause()
    await bench.update()
    late = bench.ask([3, 4, 5], 5)
    bench.engine.abort_all()
    await all_ended([*held, late])
    await bench.engine.resume()
    assert {asked.generation.finish_reason for asked in held} == {FinishReason.ABORT}
    assert late.generation.num_tokens == 0
    assert max(asked.drift(before).max() for asked in held) < TOLERANCE
    stats = bench.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


async def test_a_seed_repeats_in_another_batch_and_after_a_continuation(bench: Bench) -> None:
    alone = await bench.one([7, 8, 9], 40, seed=5)
    others = [bench.ask([n], 60, top_k=n) for n in range(1, 8)]
    beside = bench.ask([7, 8, 9], 40, seed=5)
    continued = bench.ask([7, 8, 9, *alone.new_ids[:15]], 25, continued=15, seed=5)
    await all_ended([*others, beside, continued])
    assert beside.new_ids == alone.new_ids
    assert continued.new_ids == alone.new_ids[15:]


async def test_logprobs_of_a_top_k_of_one_are_those_after_the_temperature(bench: Bench) -> None:
    asked = await bench.one([7, 8, 9], 20, top_k=1, temperature=0.5)
    assert asked.drift(bench.model, 0.5).max() < TOLERANCE


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"speculative_algorithm": "NGRAM"}, "engine_args.speculative_algorithm"),
        ({"model_path": "elsewhere"}, "engine_args.model_path: Tailrace sets it: remove it"),
        ({"no_such_argument": 1}, "no_such_argument"),
    ],
    ids=str,
)
async def test_arguments_that_cannot_work_are_refused_by_name(
    arguments: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        await start_engine(make_card(), InferenceConfig(engine="sglang", engine_args=arguments))


async def test_an_update_that_sglang_does_not_take_ends_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its parts may be of two versions, and its calls are held."""

    async def refuse(path: Path, policy_version: int, *, flush: bool) -> None:
        raise EngineFailedError(f"SGLang did not take version {policy_version}")

    async with await Bench.start(max_running=4) as made:
        watching = asyncio.create_task(made.engine.watch())
        monkeypatch.setattr(made.engine._sglang, "load", refuse)
        await made.engine.stage(iter(weights_of(made.models[1])), 1)
        with pytest.raises(EngineFailedError, match="did not take version 1"):
            await made.engine.apply()
        async with asyncio.timeout(60):
            with pytest.raises(EngineFailedError, match="did not take version 1"):
                await watching


@pytest.mark.parametrize(("device", "saves"), [({}, True), ({"device": "cpu"}, False)])
async def test_weights_that_leave_a_gpu_are_kept_on_the_host(
    bench: Bench, device: dict[str, str], saves: bool
) -> None:
    """SGLang gives them memory without their bytes otherwise."""
    given: dict[str, Any] = {"enable_weights_cpu_backup": False, **device}
    make_thread = type(bench.engine._sglang)
    make_thread(given, lambda outputs: None, 0.0, 1).allow_sleep()
    assert (given["enable_memory_saver"], given["enable_weights_cpu_backup"]) == (saves, saves)


async def test_calls_that_wait_during_a_sleep_go_on_afterwards() -> None:
    """The scheduler ends if it counts as busy when its memory goes; here the saver saves nothing."""
    async with await Bench.start(max_running=4) as made:
        made.engine._sglang._arguments["enable_memory_saver"] = True
        held = [made.ask([3, 4, 5 + number], 60) for number in range(8)]  # some run, some wait
        for asked in held[:4]:
            await asked.begun.wait()
        await made.engine.pause()
        held.append(made.ask([3, 4], 20))
        await made.engine.sleep()
        await made.engine.wake()
        await made.engine.resume()
        await all_ended(held)
        assert [asked.generation.num_tokens for asked in held] == [60] * 8 + [20]
        assert max(asked.drift(made.model).max() for asked in held) < TOLERANCE


async def test_a_cache_that_sglang_makes_smaller_is_the_one_that_counts() -> None:
    """As with `gpu_memory_utilization`: SGLang says how many tokens it has room for."""
    async with await Bench.start(max_running=4, engine_args={"max_total_tokens": 128}) as made:
        capacity = made.engine.stats().capacity_tokens
        assert 100 < capacity < 128
        refused = await made.one([3] * (capacity + 1), 5)
        assert refused.error.code is CallErrorCode.TOO_LONG
        assert refused.error.limit_tokens == capacity
        fits = await made.one([3] * (capacity - 8), 100)
        assert fits.generation.num_tokens == 8
