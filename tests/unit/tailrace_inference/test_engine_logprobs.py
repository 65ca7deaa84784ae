"""Log-probabilities are those of the model's own forward, however the engine came by them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from tests.unit.tailrace_inference.harness import (
    FAMILIES,
    Asked,
    Client,
    make_engine,
    make_model,
    own_logprobs,
    random_prompt,
)


def largest_error(model: Any, asked: list[Asked]) -> float:
    worst = 0.0
    for one in asked:
        generation = one.generation
        temperature = one.request.sampling.temperature or 1.0
        expected = own_logprobs(model, one.ids, temperature)[len(one.prompt) - 1 :]
        worst = max(worst, float(np.abs(expected - generation.inference_logprobs).max()))
    return worst


def play(client: Client, rng: np.random.Generator, num_episodes: int, num_turns: int) -> None:
    """Episodes of several turns that join at random steps; each turn extends what came before."""
    histories = [random_prompt(rng, 1, 40) for _ in range(num_episodes)]
    turns: dict[int, Asked] = {}
    left = {episode: num_turns for episode in range(num_episodes)}
    while left or turns:
        for episode in [e for e in left if e not in turns and rng.random() < 0.3]:
            temperature = float(rng.choice([0.0, 0.7, 1.0]))
            num_new = int(rng.integers(1, 12))
            turns[episode] = client.ask(
                histories[episode], num_new, episode=f"e{episode}", temperature=temperature
            )
        client.engine.step()
        for episode, asked in list(turns.items()):
            if asked.ended:
                del turns[episode]
                histories[episode] = asked.ids + random_prompt(rng, 1, 9)
                left[episode] -= 1
                if not left[episode]:
                    del left[episode]


@pytest.mark.parametrize(
    ("family", "forward"),
    [*itertools.product(FAMILIES, ("auto", "generic")), ("qwen3", "rows"), ("gpt_oss", "rows")],
)
def test_episodes_that_come_and_go_agree_with_the_model(family: str, forward: str) -> None:
    model = make_model(family)
    client = Client(make_engine(model, forward=forward, max_batched_tokens=24))
    play(client, np.random.default_rng(1), num_episodes=6, num_turns=3)
    assert largest_error(model, client.asked) < 1e-4
    stats = client.engine.stats()
    assert stats.num_prefix_hit_tokens > 0.5 * stats.num_prompt_tokens
    assert stats.num_recomputed_tokens == 0


def test_preempted_calls_are_computed_again_without_a_wrong_token() -> None:
    model = make_model()
    engine = make_engine(model, kv_cache_tokens=160, max_running=8, kv_block_tokens=4)
    client = Client(engine)
    rng = np.random.default_rng(2)
    for index in range(8):
        client.ask(random_prompt(rng, 5, 20), int(rng.integers(20, 40)), seed=index)
    client.finish()
    stats = engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_recomputed_tokens > 0
    assert largest_error(model, client.asked) < 1e-4
    plenty = Client(make_engine(model))
    for asked in client.asked:
        plenty.ask(asked.prompt, asked.request.max_new_tokens, seed=asked.request.sampling.seed)
    plenty.finish()
    assert plenty.engine.stats().num_preemptions == 0
    assert [asked.ids for asked in plenty.asked] == [asked.ids for asked in client.asked]


def test_a_prompt_longer_than_a_step_is_prefilled_in_chunks_while_others_decode() -> None:
    model = make_model()
    client = Client(make_engine(model, max_running=4, max_batched_tokens=8))
    short = client.ask([1, 2], 30)
    for _ in range(3):
        client.engine.step()
    rng = np.random.default_rng(3)
    long = client.ask(random_prompt(rng, 100, 100), 4)
    before = short.generation.num_tokens
    for _ in range(10):
        client.engine.step()
    assert short.generation.num_tokens == before + 10, "decoding never waits for a prefill"
    assert long.generation.num_tokens == 0
    client.finish()
    assert largest_error(model, client.asked) < 1e-4


@pytest.mark.parametrize("forward", ["auto", "generic", "rows"])
def test_a_prompt_longer_than_a_step_is_computed_where_no_call_decodes_beside_it(forward: str) -> None:
    model = make_model()
    client = Client(make_engine(model, forward=forward, max_batched_tokens=16))
    long = client.one([7] * 50, 4)
    assert long.generation.num_tokens == 4
    assert largest_error(model, client.asked) < 1e-4


def test_a_prefix_is_reused_up_to_where_it_differs() -> None:
    model = make_model()
    client = Client(make_engine(model))
    first = client.one([*range(1, 31)], 5, episode="e")
    edited = [*range(1, 21), 60, 61, 62]
    second = client.one(edited, 5, episode="e")
    other = client.one(edited, 5, episode="somebody else")
    assert first.generation.num_cached_tokens == 0
    assert second.generation.num_cached_tokens == 20
    assert other.generation.num_cached_tokens == 0
    assert largest_error(model, client.asked) < 1e-4


def test_the_same_prompt_again_still_computes_its_last_token() -> None:
    model = make_model()
    client = Client(make_engine(model))
    client.one([5, 6, 7, 8], 3, episode="e")
    again = client.one([5, 6, 7, 8], 3, episode="e")
    assert again.generation.num_cached_tokens == 3
    assert largest_error(model, client.asked) < 1e-4


def test_without_the_prefix_cache_nothing_is_kept() -> None:
    client = Client(make_engine(make_model(), prefix_cache=False))
    client.one([5, 6, 7, 8], 3, episode="e")
    assert client.one([5, 6, 7, 8], 3, episode="e").generation.num_cached_tokens == 0
    assert client.engine.stats().cached_tokens == 0


def test_kept_prefixes_give_way_to_running_calls_oldest_first() -> None:
    model = make_model()
    client = Client(make_engine(model, kv_cache_tokens=96, max_running=4, kv_block_tokens=8))
    for index in range(6):
        client.one([index + 1] * 24, 2, episode=f"e{index}")
    newest = client.one([6] * 24, 2, episode="e5")
    oldest = client.one([1] * 24, 2, episode="e0")
    assert newest.generation.num_cached_tokens == 23
    assert oldest.generation.num_cached_tokens == 0
    assert client.engine.stats().num_preemptions == 0
    assert largest_error(model, client.asked) < 1e-4
