"""A prompt that several calls have at once is computed once, and nobody gets another's tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.unit.tailrace_inference.harness import (
    Asked,
    Client,
    make_engine,
    make_model,
    own_logprobs,
    weights_of,
)

PROMPT = [*range(3, 26)]  # in blocks of 16 the last one is half full


def largest_error(model: Any, asked: list[Asked]) -> float:
    found = [
        np.abs(
            own_logprobs(model, one.ids)[len(one.prompt) - 1 :] - one.generation.inference_logprobs
        ).max()
        for one in asked
    ]
    return float(max(found))


def group(client: Client, size: int = 4, prompt: list[int] = PROMPT, num_new: int = 12) -> list[Asked]:
    return [client.ask(prompt, num_new, seed=seed) for seed in range(size)]


def test_a_group_computes_its_prompt_once_and_samples_what_each_would_alone() -> None:
    model = make_model()
    client = Client(make_engine(model))
    asked = group(client)
    client.finish()
    stats = client.engine.stats()
    generated = 4 * 12
    assert stats.num_computed_tokens == len(PROMPT) + 3 + generated - 4
    assert stats.num_prefix_hit_tokens == 3 * (len(PROMPT) - 1)
    assert [one.generation.num_cached_tokens for one in asked] == [0, *[len(PROMPT) - 1] * 3]
    assert largest_error(model, asked) < 1e-4
    assert stats.used_tokens == 0, "every block has one owner and came back"
    for seed, one in enumerate(asked):
        alone = Client(make_engine(model)).one(PROMPT, 12, seed=seed)
        assert one.ids == alone.ids


def test_a_late_member_copies_from_one_that_is_answering_already() -> None:
    model = make_model()
    client = Client(make_engine(model))
    first = client.ask(PROMPT, 20)
    for _ in range(5):
        client.engine.step()
    late = client.ask(PROMPT, 20)
    other = client.ask([*PROMPT[:-1], 1], 20)
    client.finish()
    assert late.generation.num_cached_tokens == len(PROMPT) - 1
    assert other.generation.num_cached_tokens == 0, "its prompt is another one"
    assert largest_error(model, [first, late, other]) < 1e-4


def test_others_overtake_members_that_wait_for_a_long_prompt() -> None:
    model = make_model()
    client = Client(make_engine(model, max_batched_tokens=8))
    long = np.random.default_rng(0).integers(1, 60, 64).tolist()
    members = group(client, 3, long)
    other = client.ask([7, 8, 9], 3)
    client.engine.step()
    stats = client.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 2), "the first member and the other call"
    client.finish()
    assert client.engine.stats().num_computed_tokens < 64 + 60
    assert largest_error(model, [*members, other]) < 1e-4


def test_when_the_one_that_computes_is_aborted_another_member_does() -> None:
    model = make_model()
    client = Client(make_engine(model, max_batched_tokens=8))
    members = group(client, 3)
    client.engine.step()
    client.engine.abort(members[0].request.call_id)
    client.finish()
    assert members[0].generation.num_tokens == 0
    assert largest_error(model, members[1:]) < 1e-4
    assert client.engine.stats().num_prefix_hit_tokens == len(PROMPT) - 1


@pytest.mark.parametrize("kv_on_update", ["keep", "recompute"])
def test_keys_and_values_of_old_weights_are_not_copied(kv_on_update: str) -> None:
    old, new = make_model(seed=0), make_model(seed=1)
    engine = make_engine(old, kv_on_update=kv_on_update)
    client = Client(engine)
    client.ask(PROMPT, 40)
    for _ in range(4):
        engine.step()
    engine.stage(weights_of(new), 1)
    engine.apply()
    later = group(client, 3)
    client.finish()
    assert largest_error(new, later) < 1e-4
    cached = [one.generation.num_cached_tokens for one in later]
    shared = len(PROMPT) - 1
    assert cached == ([0, shared, shared] if kv_on_update == "keep" else [shared] * 3)


def test_members_are_preempted_and_come_back_with_their_own_tokens() -> None:
    model = make_model()
    settings = {"kv_cache_tokens": 160, "kv_block_tokens": 4}
    tight, plenty = Client(make_engine(model, **settings)), Client(make_engine(model))
    for client in (tight, plenty):
        group(client, 8, num_new=24)
        client.finish()
    assert tight.engine.stats().num_preemptions > 0
    assert plenty.engine.stats().num_preemptions == 0
    assert [one.ids for one in tight.asked] == [one.ids for one in plenty.asked]
    assert tight.engine.stats().used_tokens == 0


def test_short_prompts_and_engines_without_prefix_cache_share_nothing() -> None:
    model = make_model()
    for prompt, settings in ((PROMPT[:7], {}), (PROMPT, {"prefix_cache": False})):
        client = Client(make_engine(model, **settings))
        group(client, 3, prompt)
        client.finish()
        assert client.engine.stats().num_prefix_hit_tokens == 0
