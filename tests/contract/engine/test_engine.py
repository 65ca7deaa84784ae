"""What every engine does alike. `TAILRACE_ENGINE` names the engine, see `make test-engines`."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tailrace.weights.target_types import TARGETS
from tailrace_inference.ports import WeightMismatchError
from tailrace_protos.base import as_float32, as_int32
from tailrace_protos.generation import CallErrorCode, FinishReason
from tests.contract.engine.harness import (
    ENGINE,
    ENGINE_ARGS,
    EOS,
    LONG,
    MAX_LEN,
    TOLERANCE,
    VOCAB_SIZE,
    Bench,
    all_ended,
    own_logprobs,
    text_of,
    weights_of,
)
from tests.world.declared_types import in_type, rounded

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANY = tuple(range(VOCAB_SIZE))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench() -> AsyncIterator[Bench]:
    async with await Bench.start() as made:
        yield made


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 1.7, "top_k": 5},
        {"temperature": 0.8, "top_p": 0.6},
        {"min_p": 0.3},
        {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
        {"temperature": 0.0},
    ],
    ids=str,
)
async def test_sampling_parameters_filter_tokens_and_logprobs_are_those_before_the_filters(
    bench: Bench, sampling: dict[str, float]
) -> None:
    if "min_p" in sampling and not bench.engine.features.min_p:
        refused = await bench.one([5, 6, 7, 8], 60, **sampling)
        assert refused.error.code is CallErrorCode.INVALID
        assert "sampling.min_p" in refused.error.reason
        return
    asked = bench.ask([5, 6, 7, 8], 60, **sampling)
    other = bench.ask([9, 10], 20)  # another temperature in the same batch
    await all_ended([asked, other])
    temperature = sampling.get("temperature", 1.0) or 1.0
    assert asked.drift(bench.model, temperature).max() < TOLERANCE
    assert other.drift(bench.model).max() < TOLERANCE
    own = own_logprobs(bench.model, asked.ids, temperature)[3:].astype(np.float64)
    for row, token in zip(np.exp(own), asked.new_ids, strict=True):
        order = np.argsort(-row)
        if sampling.get("temperature") == 0.0:
            assert row[token] >= row[order[0]] * (1 - 1e-4)
        rank = int((row > row[token] * (1 + 1e-4)).sum())
        assert rank < int(sampling.get("top_k", VOCAB_SIZE))
        kept = row[order[: int(sampling.get("top_k", VOCAB_SIZE))]]
        assert kept[:rank].sum() / kept.sum() <= sampling.get("top_p", 1.0) + 1e-3
        assert row[token] >= sampling.get("min_p", 0.0) * row.max() * (1 - 1e-3)


@pytest.mark.parametrize("temperature", [1e-3, 1e-8])
async def test_a_tiny_temperature_is_followed_or_refused(bench: Bench, temperature: float) -> None:
    asked = await bench.one([5, 6, 7, 8], 8, temperature=temperature)
    least = bench.engine.features.least_temperature
    assert (asked.error is not None) == (temperature < least)
    if asked.error is None:
        assert asked.drift(bench.model, temperature).max() < TOLERANCE
    else:
        assert asked.error.code is CallErrorCode.INVALID
        assert "sampling.temperature" in asked.error.reason


async def test_top_logprobs_are_the_likeliest_of_the_same_distribution(bench: Bench) -> None:
    asked = await bench.one([5, 6, 7], 12, tops=4, temperature=0.7, top_k=2)
    ids = np.concatenate([as_int32(chunk.top_ids) for chunk in asked.chunks]).reshape(-1, 4)
    found = np.concatenate([as_float32(chunk.top_logprobs) for chunk in asked.chunks]).reshape(-1, 4)
    own = own_logprobs(bench.model, asked.ids, 0.7)[2:]
    assert len(ids) == 12
    assert np.abs(-np.sort(-own)[:, :4] - found).max() < TOLERANCE
    assert np.abs(np.take_along_axis(own, ids, 1) - found).max() < TOLERANCE


async def test_tokens_come_in_several_chunks_and_the_budget_ends_them(bench: Bench) -> None:
    asked = await bench.one([1, 2, 3], 150)
    assert asked.generation.num_tokens == 150
    assert asked.generation.finish_reason is FinishReason.LENGTH
    assert asked.generation.stop_matched is None
    assert len(asked.chunks) > 2
    assert asked.generation.inference_logprobs.dtype == np.float32
    assert set(asked.versions()) == {bench.policy_version}


async def test_a_stop_id_ends_a_call_and_is_its_last_token(bench: Bench) -> None:
    free = (await bench.one([1, 2, 3], 30, temperature=0.0)).new_ids
    stop = free[9]
    asked = await bench.one([1, 2, 3], 30, temperature=0.0, stop_token_ids=(stop, EOS + 1))
    assert asked.new_ids == free[: free.index(stop) + 1] or EOS + 1 in free
    assert asked.generation.finish_reason is FinishReason.STOP
    assert asked.generation.stop_matched == asked.new_ids[-1]


async def test_a_reply_of_the_stop_id_alone(bench: Bench) -> None:
    asked = await bench.one([4, 4, 4], 30, stop_token_ids=ANY)
    assert asked.generation.num_tokens == 1
    assert asked.generation.finish_reason is FinishReason.STOP
    assert asked.generation.stop_matched == asked.new_ids[0]


async def test_the_end_of_sequence_token_is_no_stop_unless_the_request_says_so(bench: Bench) -> None:
    free = [bench.ask([n], 200, temperature=2.0) for n in range(8)]
    bound = [bench.ask([n], 200, temperature=2.0, stop_token_ids=(EOS,)) for n in range(8)]
    await all_ended([*free, *bound])
    assert any(EOS in asked.new_ids[:-1] for asked in free)
    assert {asked.generation.num_tokens for asked in free} == {200}
    stopped = [asked for asked in bound if asked.generation.finish_reason is FinishReason.STOP]
    assert stopped
    assert all(asked.new_ids.index(EOS) == len(asked.new_ids) - 1 for asked in stopped)


async def test_a_stop_string_across_tokens_ends_a_call_at_the_token_that_completes_it(
    bench: Bench,
) -> None:
    free = (await bench.one([1, 2, 3], 40, temperature=0.0)).new_ids
    stop = text_of(free[10:13])
    end = text_of(free).index(stop) + 3
    asked = await bench.one([1, 2, 3], 40, temperature=0.0, stop=("never said", stop))
    assert asked.new_ids == free[:end]
    assert asked.generation.finish_reason is FinishReason.STOP
    assert asked.generation.stop_matched == stop
    assert asked.drift(bench.model).max() < TOLERANCE
    begun = end - 2
    late = await bench.one([1, 2, 3, *free[:begun]], 9, continued=begun, temperature=0.0, stop=(stop,))
    assert late.new_ids == free[begun:end]
    assert late.generation.stop_matched == stop


@pytest.mark.parametrize(
    ("prompt", "num_new", "sampling", "field"),
    [
        ([], 5, {}, "prompt_ids"),
        ([VOCAB_SIZE], 5, {}, "prompt_ids"),
        ([1] * MAX_LEN, 5, {}, "prompt_ids"),
        ([1], 0, {}, "max_new_tokens"),
        ([1], 5, {"temperature": -0.1}, "temperature"),
        ([1], 5, {"top_p": 0.0}, "top_p"),
        ([1], 5, {"top_k": -1}, "top_k"),
        ([1], 5, {"top_k": 2**31}, "top_k"),
        ([1], 5, {"min_p": 1.5}, "min_p"),
        ([1], 5, {"stop_token_ids": (VOCAB_SIZE,)}, "stop_token_ids"),
        ([1], 5, {"stop": ("",)}, "stop"),
        ([1], 5, {"continued": 2}, "num_continued"),
        ([1], 5, {"tops": 21}, "top_logprobs"),
    ],
)
async def test_a_wrong_request_is_answered_with_the_field(
    bench: Bench, prompt: list[int], num_new: int, sampling: dict[str, Any], field: str
) -> None:
    asked = await bench.one(prompt, num_new, **sampling)
    is_long = len(prompt) >= MAX_LEN  # its episode is too long: no mistake of the caller
    assert asked.error.code is (CallErrorCode.TOO_LONG if is_long else CallErrorCode.INVALID)
    assert asked.error.limit_tokens == (MAX_LEN if is_long else 0)
    assert field in asked.error.reason


async def test_a_prompt_at_the_limit_gets_what_is_left(bench: Bench) -> None:
    for left in (1, 5):
        asked = await bench.one([3] * (MAX_LEN - left), 100)
        assert asked.generation.num_tokens == left
        assert asked.generation.finish_reason is FinishReason.LENGTH


async def test_a_seed_repeats_its_tokens(bench: Bench) -> None:
    first, second, other = [
        (await bench.one([7, 8, 9], 40, seed=seed)).new_ids for seed in (11, 11, 12)
    ]
    assert bench.engine.features.seeds != "no"
    assert first == second != other


async def test_seeded_calls_with_more_prompt_tokens_than_a_step_computes(bench: Bench) -> None:
    many = [bench.ask([n + 1] * 200, 8, seed=n) for n in range(40)]
    await all_ended(many)
    assert {asked.generation.num_tokens for asked in many} == {8}
    assert max(asked.drift(bench.model).max() for asked in many[::8]) < TOLERANCE


async def test_many_requests_at_once_all_end_and_leave_nothing(bench: Bench) -> None:
    many = [bench.ask([n % VOCAB_SIZE, n // VOCAB_SIZE + 1], 5 + n % 40) for n in range(256)]
    await all_ended(many)
    assert [asked.generation.num_tokens for asked in many] == [5 + n % 40 for n in range(256)]
    assert max(asked.drift(bench.model).max() for asked in many[::16]) < TOLERANCE
    stats = bench.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


async def test_an_aborted_call_keeps_its_tokens_and_others_go_on(bench: Bench) -> None:
    gone, other = bench.ask([1, 2], LONG), bench.ask([3], 60)
    await gone.begun.wait()
    bench.engine.abort(gone.request.call_id)
    bench.engine.abort("never heard of")
    await all_ended([gone, other])
    assert gone.generation.finish_reason is FinishReason.ABORT
    assert 0 < gone.generation.num_tokens < LONG
    assert gone.drift(bench.model).max() < TOLERANCE
    assert len(gone.versions()) == gone.generation.num_tokens
    assert other.generation.num_tokens == 60


async def test_aborting_at_once_and_all_leaves_no_call(bench: Bench) -> None:
    early = bench.ask([1, 2], LONG)
    bench.engine.abort(early.request.call_id)
    many = [bench.ask([n], LONG) for n in range(20)]
    await many[-1].begun.wait()
    bench.engine.abort_all()
    await all_ended([early, *many])
    assert {asked.generation.finish_reason for asked in (early, *many)} == {FinishReason.ABORT}
    stats = bench.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)


async def test_a_paused_engine_holds_calls_and_takes_updates(bench: Bench) -> None:
    held = bench.ask([1, 2], LONG)
    await held.begun.wait()
    await bench.engine.pause()
    await bench.update()
    late, seen = bench.ask([5], 3), -1
    while seen != held.buffer.num_tokens:  # until those on their way are there, or all of the call
        seen = held.buffer.num_tokens
        await asyncio.sleep(0.2)
    assert not held.ended.is_set()
    assert not late.ended.is_set()
    await bench.engine.resume()
    await all_ended([held, late])
    assert held.generation.num_tokens == LONG
    assert late.versions() == [bench.policy_version] * 3


async def test_a_call_goes_on_after_a_sleep_and_weights_come_in_afterwards(bench: Bench) -> None:
    if not bench.engine.features.sleep:
        pytest.skip("this engine keeps its memory")
    held = bench.ask([1, 2], LONG)
    await held.begun.wait()
    await bench.engine.pause()
    await bench.engine.sleep()
    seen, late = held.buffer.num_tokens, bench.ask([5], 3)
    await bench.engine.wake()
    await bench.engine.resume()
    await all_ended([held, late])
    assert held.generation.num_tokens == LONG > seen
    assert held.drift(bench.model).max() < TOLERANCE
    await bench.update()
    after = await bench.one([1, 2, 3], 20)
    assert after.drift(bench.model).max() < TOLERANCE


async def test_a_turn_finds_the_keys_of_the_last_one_until_the_weights_change(bench: Bench) -> None:
    if not bench.engine.features.prefix_reuse:
        pytest.skip("this engine keeps no prefixes")
    prompt = [n % VOCAB_SIZE for n in range(100)]
    first = await bench.one(prompt, 20, episode="e")
    again = [*first.ids, 4, 5]
    second = await bench.one(again, 10, episode="e")
    assert second.generation.num_cached_tokens >= 64
    assert second.drift(bench.model).max() < TOLERANCE
    assert bench.engine.stats().num_prefix_hit_tokens >= 64
    await bench.update()
    third = await bench.one([*second.ids, 6], 10, episode="e")
    assert third.generation.num_cached_tokens == 0
    assert third.drift(bench.model).max() < TOLERANCE


async def test_updates_in_flight_are_exact_to_the_token_and_abort_nothing(bench: Bench) -> None:
    many = [bench.ask([n, n + 1], 240, temperature=0.9) for n in range(60)]
    first = bench.policy_version
    await many[0].begun.wait()
    for _ in range(20):
        await bench.update()
        await asyncio.sleep(0)
    await all_ended(many)
    assert {asked.generation.finish_reason for asked in many} == {FinishReason.LENGTH}
    seen: set[int] = set()
    for asked in many:
        drifts = [asked.drift(model, 0.9) for model in bench.models]
        versions = asked.versions()
        assert versions == sorted(versions)
        seen |= set(versions)
        right = [drifts[version % 2][place] for place, version in enumerate(versions)]
        assert max(right) < TOLERANCE
    assert len(seen & set(range(first, first + 21))) > 2, "calls ran while the weights changed"
    stats = bench.engine.stats()
    assert stats.policy_version == bench.policy_version
    assert stats.num_recomputed_tokens > 0


async def test_an_update_that_does_not_fit_is_named_and_the_old_version_stays(bench: Bench) -> None:
    good = weights_of(bench.model_of(bench.policy_version + 1))
    bad = {
        "missing": good[1:],
        "no tensor": [*good, good[0]._replace(name="model.extra")],
        "shape": [good[0]._replace(shape=(1,)), *good[1:]],
        "bytes": [good[0]._replace(data=good[0].data[:-4]), *good[1:]],
        "unknown dtype": [good[0]._replace(dtype="float31"), *good[1:]],
    }
    for reason, tensors in bad.items():
        with pytest.raises(WeightMismatchError, match=reason):
            await bench.engine.stage(iter(tensors), bench.policy_version + 1)
    asked = await bench.one([1, 2, 3], 5)
    assert asked.versions() == [bench.policy_version] * 5
    assert asked.drift(bench.model).max() < TOLERANCE


@pytest.mark.parametrize("target", TARGETS)
async def test_weights_of_a_declared_type_are_widened_exactly(bench: Bench, target: str) -> None:
    version = bench.policy_version + 1
    given = bench.model_of(version)
    await bench.engine.stage(iter(in_type(weights_of(given), target)), version)
    await bench.engine.apply()
    bench.policy_version = version
    asked = await bench.one([1, 2, 3], 40)
    assert asked.versions() == [version] * 40
    assert asked.drift(rounded(given, target)).max() < TOLERANCE
    assert asked.drift(given).max() > TOLERANCE, "rounding must show"
    await bench.update()


async def test_drafts_are_accepted_where_the_engine_speculates_and_change_no_probability(
    bench: Bench,
) -> None:
    before = bench.engine.stats()
    many = [bench.ask([n, n + 1] * 8, 120, temperature=0.3 * (n % 4)) for n in range(16)]
    await all_ended(many)
    after = bench.engine.stats()
    for n, asked in enumerate(many):
        assert asked.generation.num_tokens == 120
        assert asked.drift(bench.model, 0.3 * (n % 4) or 1.0).max() < TOLERANCE
    drafted = after.num_drafted_tokens - before.num_drafted_tokens
    accepted = after.num_accepted_tokens - before.num_accepted_tokens
    assert drafted >= accepted
    assert (accepted > 0) == bool(ENGINE_ARGS.get("speculative_config"))


async def test_tokens_are_drawn_from_the_model_s_distribution(bench: Bench) -> None:
    """Drafts repeat what stands before: a wrong check of them would prefer it."""
    prompt = [*range(VOCAB_SIZE), 7, 8]
    many = [bench.ask(prompt, 3) for _ in range(600)]
    await all_ended(many)
    seconds: dict[int, list[int]] = {}
    for asked in many:
        seconds.setdefault(asked.new_ids[0], []).append(asked.new_ids[1])
    firsts = Counter(asked.new_ids[0] for asked in many)
    own = np.exp(own_logprobs(bench.model, [*prompt, 0])[-1].astype(np.float64))
    distance = 0.5 * sum(abs(firsts[token] / 600 - own[token]) for token in range(VOCAB_SIZE))
    assert distance < 0.2
    first, drawn = max(seconds.items(), key=lambda item: len(item[1]))
    own = np.exp(own_logprobs(bench.model, [*prompt, first, 0])[-1].astype(np.float64))
    counts = np.bincount(drawn, minlength=VOCAB_SIZE).tolist()
    assert min(map(_chance, counts, [len(drawn)] * VOCAB_SIZE, own.tolist())) > 1e-9


def _chance(count: int, num_draws: int, share: float) -> float:
    """Probability that a token comes this often, or still further from its share of all draws."""
    further = range(count, num_draws + 1) if count > num_draws * share else range(count + 1)
    return sum(
        math.comb(num_draws, times) * share**times * (1 - share) ** (num_draws - times)
        for times in further
    )


async def test_stats_count_calls_tokens_and_steps(bench: Bench) -> None:
    before = bench.engine.stats()
    many = [bench.ask([n], 100) for n in range(8)]
    await asyncio.gather(*(asked.begun.wait() for asked in many))
    during = bench.engine.stats()
    await all_ended(many)
    after = bench.engine.stats()
    assert during.num_running + during.num_waiting == 8
    assert 0 < during.used_tokens <= during.capacity_tokens
    assert after.num_generated_tokens - before.num_generated_tokens == 800
    assert after.num_prompt_tokens - before.num_prompt_tokens == 8
    assert after.num_finished - before.num_finished == 8
    assert after.num_steps > before.num_steps
    assert after.step_s > before.step_s
    num_read = after.num_read_tokens - before.num_read_tokens
    if ENGINE == "sglang":
        assert not num_read, "it does not tell them"
    elif "speculative_config" not in ENGINE_ARGS:  # steps that make many tokens read less
        least = 8 * sum(range(1, 100))
        assert least <= num_read <= 1.5 * least, "vllm counts whole blocks"
