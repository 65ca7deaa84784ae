"""More calls than an engine runs at once, and keys and values that outlive an update."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from tailrace_protos.generation import FinishReason
from tests.contract.engine.harness import ENGINE, LONG, MAX_LEN, TOLERANCE, Bench, all_ended

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_RUNNING = 4


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started() -> AsyncIterator[Bench]:
    """An engine with little room, for several tests."""
    async with await Bench.start(max_running=NUM_RUNNING, kv_cache_tokens=1024) as bench:
        yield bench


@pytest_asyncio.fixture(loop_scope="module")
async def small(started: Bench) -> Bench:
    """The same, told of new weights: it has no keys of earlier tests."""
    if not started.engine.features.releases_prefixes:
        pytest.skip("this engine cannot be told")
    await started.update()
    return started


async def test_an_update_with_a_queue_leaves_no_keys_of_old_weights_and_loses_no_call() -> None:
    async with await Bench.start(max_running=NUM_RUNNING, kv_cache_tokens=4096) as bench:
        shared = [n % 60 for n in range(64)]
        await bench.stage()
        many = [bench.ask([*shared, n], 200, episode=f"e{n}") for n in range(3 * NUM_RUNNING)]
        await many[0].begun.wait()
        assert bench.engine.stats().num_waiting > 0
        await bench.swap()
        await all_ended(many)
        assert {asked.generation.finish_reason for asked in many} == {FinishReason.LENGTH}
        for asked in many:
            drifts = [asked.drift(model) for model in bench.models]
            versions = asked.versions()
            assert max(drifts[version][place] for place, version in enumerate(versions)) < TOLERANCE
        assert many[-1].versions()[-1] == bench.policy_version
        longest = await bench.one([5] * (MAX_LEN - 1), 9)
        assert longest.generation.num_tokens == 1
        assert longest.generation.finish_reason is FinishReason.LENGTH


@pytest.mark.skipif(
    ENGINE not in ("torch", "vllm") or torch.cuda.is_available(),
    reason="it computes all contexts in one step, as every engine does on a GPU",
)
async def test_after_an_update_the_shortest_context_goes_on_while_others_are_computed_again() -> None:
    async with await Bench.start(stream_chunk_tokens=1, stream_interval_ms=0.0) as bench:
        long = [bench.ask([n, *range(60), n, *range(60), n, *range(60)], 300) for n in range(5)]
        short = bench.ask([1, 2, 3], 400)
        await bench.stage()
        for asked in (*long, short):
            await asked.begun.wait()
        await bench.swap()
        await all_ended([*long, short])
        new = [
            chunk.call_id
            for chunk in bench.arrived
            if chunk.spans and chunk.spans[-1].policy_version == bench.policy_version
        ]
        assert new[0] == short.request.call_id
        last_begins = max(new.index(asked.request.call_id) for asked in long)
        assert new[:last_begins].count(short.request.call_id) >= 3
        for asked in (*long, short):
            drifts = [asked.drift(model) for model in bench.models]
            assert max(drifts[version][at] for at, version in enumerate(asked.versions())) < TOLERANCE


@pytest.mark.skipif(ENGINE == "hf", reason="it computes all keys again")
async def test_kept_keys_serve_later_turns_of_their_version_and_are_counted() -> None:
    async with await Bench.start(
        kv_on_update="keep", max_running=NUM_RUNNING, kv_cache_tokens=4096
    ) as bench:
        prompt = [n % 60 for n in range(100)]
        first = await bench.one(prompt, 20, episode="e")
        second = await bench.one([*first.ids, 3], 10, episode="e")
        assert second.generation.num_cached_tokens >= 64
        await bench.stage()
        held = bench.ask([7, 8, 9], LONG)
        await held.begun.wait()
        await bench.swap()
        await all_ended([held])
        assert set(held.versions()) == {0, 1}
        stats = bench.engine.stats()
        assert 0 < stats.num_stale_kv_tokens <= held.versions().count(1)
        assert stats.num_recomputed_tokens == 0
        fresh = await bench.one([6, 5, 4], 20)
        assert fresh.drift(bench.model).max() < TOLERANCE


@pytest.mark.parametrize("is_told", [True, False])
async def test_released_contexts_leave_before_older_ones_of_siblings(
    small: Bench, is_told: bool
) -> None:
    shared = [n % 60 for n in range(64)]
    ended = f"ended-{is_told}"
    older = await small.one([*shared, 1, *range(35)], 93, episode="older")
    await small.one([*shared, 2, *range(35)], 93, episode=ended)
    if is_told:
        small.engine.release_prefixes([ended, "unknown"])
    for number, num_prompt in enumerate((216, 216, 216, 120)):  # 800 tokens: more than are free,
        await small.one([number + 3] * num_prompt, 9)  # and less than with the ended context
    again = await small.one([*older.ids, 3], 10, episode="older")
    assert (again.generation.num_cached_tokens > 180) is is_told
    assert again.drift(small.model).max() < TOLERANCE


async def test_releases_touch_no_running_call_and_no_shared_prompt(small: Bench) -> None:
    shared = [n % 60 for n in range(64)]
    running = small.ask(shared, 180, episode="running")
    await running.begun.wait()
    sibling = await small.one(shared, 10, episode="sibling")
    small.engine.release_prefixes(["sibling", "running"])
    late = await small.one(shared, 40, episode="late")
    await all_ended([running])
    for asked in (running, sibling, late):
        assert asked.drift(small.model).max() < TOLERANCE
    assert late.generation.num_cached_tokens >= 32
