"""The likeliest tokens of each step are those of the model's own forward, for who asked only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tailrace_protos.generation import CallErrorCode
from tests.unit.tailrace_inference.harness import (
    Asked,
    Client,
    make_engine,
    make_model,
    random_prompt,
)


def distributions(model: Any, ids: Sequence[int], temperature: float) -> NDArray[np.float32]:
    """Log-probabilities [T - 1, vocabulary] of what may follow each of `ids` but the last."""
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0].float()
    whole: NDArray[np.float32] = torch.log_softmax(logits / temperature, -1)[:-1].numpy()
    return whole


def assert_tops_are_the_models(model: Any, asked: Asked, width: int) -> None:
    generation = asked.generation
    assert generation.top_ids is not None
    assert generation.top_logprobs is not None
    assert generation.top_ids.shape == (generation.num_tokens, width)
    temperature = asked.request.sampling.temperature or 1.0
    whole = distributions(model, asked.ids, temperature)[len(asked.prompt) - 1 :]
    best = -np.sort(-whole, axis=1)[:, :width]
    assert np.abs(generation.top_logprobs - best).max() < 1e-4
    told = np.take_along_axis(whole, generation.top_ids.astype(np.int64), axis=1)
    assert np.abs(generation.top_logprobs - told).max() < 1e-4
    assert all(len(set(row)) == width for row in generation.top_ids.tolist())


def test_the_likeliest_token_of_a_greedy_call_is_the_sampled_one() -> None:
    asked = Client(make_engine(make_model())).one([3, 4, 5], 12, tops=1, temperature=0.0)
    generation = asked.generation
    assert generation.top_ids is not None
    assert generation.top_logprobs is not None
    assert generation.top_ids[:, 0].tolist() == generation.token_ids.tolist()
    assert generation.top_logprobs[:, 0].tolist() == generation.inference_logprobs.tolist()


def test_each_call_gets_as_many_as_it_asked_for_also_when_preempted_and_in_large_chunks() -> None:
    model = make_model()
    settings = {"kv_cache_tokens": 160, "kv_block_tokens": 4, "stream_interval_ms": 10_000}
    client = Client(make_engine(model, max_running=8, stream_chunk_tokens=8, **settings))
    rng = np.random.default_rng(2)
    widths = [0, 3, 20, 1, 0, 5, 2, 20]
    for index, width in enumerate(widths):
        temperature = float(rng.choice([0.0, 0.6, 1.0]))
        num_new = int(rng.integers(20, 40))
        prompt = random_prompt(rng, 5, 20)
        client.ask(prompt, num_new, tops=width, seed=index, temperature=temperature, top_p=0.9)
    client.finish()
    assert client.engine.stats().num_preemptions > 0
    for asked, width in zip(client.asked, widths, strict=True):
        if width:
            assert_tops_are_the_models(model, asked, width)
        else:
            assert asked.generation.top_ids is None
            assert not any(len(chunk.top_ids) or len(chunk.top_logprobs) for chunk in asked.chunks)


def test_asking_changes_no_sampled_token() -> None:
    model = make_model()
    plain = Client(make_engine(model)).one([7, 8], 20, seed=5)
    asking = Client(make_engine(model)).one([7, 8], 20, seed=5, tops=4)
    assert asking.ids == plain.ids
    assert asking.generation.inference_logprobs.tolist() == plain.generation.inference_logprobs.tolist()


@pytest.mark.parametrize("width", [-1, 21])
def test_more_than_an_engine_keeps_is_refused_by_its_name(width: int) -> None:
    asked = Client(make_engine(make_model())).one([1], 1, tops=width)
    assert asked.error.code is CallErrorCode.INVALID
    assert f"top_logprobs is {width}" in asked.error.reason
