"""Sampling: the right distribution, whatever the batch; the filters are those of transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessorList, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from tailrace_inference.engine.sampling import SamplingRows, choose, scaled_logprobs, uniforms
from tests.unit.tailrace_inference.harness import Client, make_engine, make_model

VOCAB_SIZE = 40


def sample(logits: torch.Tensor, rows: SamplingRows) -> tuple[torch.Tensor, torch.Tensor]:
    """As the engine samples."""
    return choose(scaled_logprobs(logits, rows), rows)


def rows(count: int, **columns: Any) -> SamplingRows:
    defaults: dict[str, tuple[Any, Any]] = {
        "temperature": (1.0, np.float32),
        "top_p": (1.0, np.float32),
        "top_k": (0, np.int64),
        "min_p": (0.0, np.float32),
        "key": (7, np.uint64),
        "counter": (np.arange(count), np.int64),
    }
    return SamplingRows(
        **{
            name: np.broadcast_to(np.asarray(columns.get(name, value), dtype), (count,)).copy()
            for name, (value, dtype) in defaults.items()
        }
    )


def frequencies(tokens: torch.Tensor) -> np.ndarray[Any, Any]:
    return np.bincount(tokens.numpy(), minlength=VOCAB_SIZE) / len(tokens)


def logits_of_one(seed: int = 0) -> torch.Tensor:
    return torch.randn(VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(
    ("columns", "warpers"),
    [
        ({}, []),
        ({"temperature": 0.7}, []),
        ({"top_k": 5}, [TopKLogitsWarper(5)]),
        ({"top_p": 0.8}, [TopPLogitsWarper(0.8)]),
        ({"min_p": 0.1}, [MinPLogitsWarper(0.1)]),
        (
            {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "min_p": 0.05},
            [TopKLogitsWarper(20), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
        ),
    ],
)
def test_frequencies_are_those_of_the_filtered_distribution(
    columns: dict[str, float], warpers: list[Any]
) -> None:
    logits, count = logits_of_one(), 40_000
    tokens, logprobs = sample(logits.expand(count, -1), rows(count, **columns))
    scaled = (logits / columns.get("temperature", 1.0)).unsqueeze(0)
    expected = LogitsProcessorList(warpers)(None, scaled).softmax(-1)[0].numpy()
    assert (frequencies(tokens)[expected == 0] == 0).all(), "what is filtered out never comes"
    assert np.abs(frequencies(tokens) - expected).max() < 0.012
    unfiltered = scaled.log_softmax(-1)[0][tokens]
    assert torch.allclose(logprobs, unfiltered, atol=1e-5)


def test_temperature_zero_takes_the_likeliest_and_reports_its_logprob_at_one() -> None:
    logits = torch.stack([logits_of_one(seed) for seed in range(6)])
    temperature = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
    tokens, logprobs = sample(logits, rows(6, temperature=temperature))
    assert tokens[::2].tolist() == logits[::2].argmax(-1).tolist()
    expected = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    assert torch.allclose(logprobs, expected, atol=1e-6)


@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-30, 1e-6])
def test_a_tiny_temperature_takes_the_likeliest_with_certainty(temperature: float) -> None:
    logits = torch.stack([logits_of_one(seed) for seed in range(6)]) * 20
    tokens, logprobs = sample(logits, rows(6, temperature=temperature))
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert torch.equal(logprobs, torch.zeros(6))


def test_at_a_huge_temperature_all_allowed_tokens_are_equally_likely() -> None:
    logits = logits_of_one().expand(4000, -1).clone()
    logits[:, 5:] = -torch.inf  # by a guide
    with np.errstate(over="ignore"):
        tokens, logprobs = sample(logits, rows(4000, temperature=1e300))
    assert np.abs(frequencies(tokens)[:5] - 0.2).max() < 0.03
    assert torch.allclose(logprobs, torch.full((4000,), 0.2).log())


def test_mixed_rows_are_sampled_as_if_alone() -> None:
    logits = torch.stack([logits_of_one(seed) for seed in range(4)])
    columns = {
        "temperature": [1.0, 0.0, 0.5, 2.0],
        "top_k": [0, 3, 2, 0],
        "top_p": [1.0, 1.0, 0.5, 0.9],
        "min_p": [0.0, 0.0, 0.0, 0.2],
        "key": [1, 2, 3, 4],
        "counter": [5, 6, 7, 8],
    }
    together, _ = sample(logits, rows(4, **columns))
    alone = [
        sample(logits[i : i + 1], rows(1, **{name: values[i] for name, values in columns.items()}))[0]
        for i in range(4)
    ]
    assert together.tolist() == [int(token) for token in alone]


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31))
@settings(max_examples=50, deadline=None)
def test_uniform_numbers_depend_on_key_and_counter_alone(key: int, counter: int) -> None:
    one = uniforms(np.array([key], np.uint64), np.array([counter]))
    many = uniforms(np.array([3, key, key], np.uint64), np.array([counter, counter, counter + 1]))
    assert many[1] == one[0]
    assert 0 <= one[0] < 1
    assert many[2] != one[0] or many[0] != one[0]


def test_uniform_numbers_are_uniform_along_both_arguments() -> None:
    count = 20_000
    keys, zeros = np.arange(count, dtype=np.uint64), np.zeros(count, np.int64)
    for numbers in (uniforms(keys, zeros), uniforms(zeros.astype(np.uint64), np.arange(count))):
        histogram = np.bincount((numbers * 20).astype(int), minlength=20)
        assert np.abs(histogram - count / 20).max() < 5 * np.sqrt(count / 20)
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_a_token_without_probability_is_not_drawn_at_either_end() -> None:
    logits = torch.full((5000, VOCAB_SIZE), -torch.inf)
    logits[:, 17] = 0.0
    tokens, logprobs = sample(logits, rows(5000))
    assert set(tokens.tolist()) == {17}
    assert (logprobs == 0).all()


def test_a_seed_fixes_a_call_in_any_company() -> None:
    model = make_model()
    alone = Client(make_engine(model)).one([1, 2, 3], 20, seed=11)
    busy = Client(make_engine(model, max_batched_tokens=16))
    for index in range(7):
        busy.ask([4 + index] * (1 + 3 * index), 9 + index)
    busy.engine.step()
    same = busy.one([1, 2, 3], 20, seed=11)
    other = busy.one([1, 2, 3], 20, seed=12)
    assert same.ids == alone.ids
    assert other.ids != alone.ids


def test_a_seeded_call_continues_elsewhere_as_it_would_have_here() -> None:
    model = make_model()
    whole = Client(make_engine(model)).one([1, 2, 3], 20, seed=11).ids
    rest = Client(make_engine(model)).one(whole[:10], 13, seed=11, continued=7)
    assert rest.ids == whole


def test_calls_without_a_seed_differ() -> None:
    client = Client(make_engine(make_model()))
    assert client.one([1, 2, 3], 20).ids != client.one([1, 2, 3], 20).ids
