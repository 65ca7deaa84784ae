"""Padded decode steps, recorded once for each size; on the CPU a record is run again as it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tailrace_inference.engine import decode_graphs
from tailrace_inference.engine.decode_graphs import Compute
from tests.unit.tailrace_inference.harness import (
    Client,
    make_engine,
    make_model,
    own_logprobs,
    random_prompt,
    weights_of,
)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Compute]:
    """Everything that was recorded."""
    found: list[Compute] = []

    def record(compute: Compute, pool: Any) -> Compute:
        compute()
        found.append(compute)
        return compute

    monkeypatch.setitem(decode_graphs.RECORDERS, "cpu", record)
    return found


def check(model: Any, client: Client) -> None:
    """Every token's log-probability is the model's."""
    for asked in client.asked:
        found = asked.generation.inference_logprobs
        assert len(found) == asked.request.max_new_tokens
        np.testing.assert_allclose(found, own_logprobs(model, asked.ids)[-len(found) :], atol=1e-4)


def test_padded_steps_give_the_tokens_of_steps_without_padding(recorded: list[Compute]) -> None:
    rng, model = np.random.default_rng(0), make_model()
    prompts = [random_prompt(rng, 2, 90) for _ in range(7)]
    graphed, plain = Client(make_engine(model)), Client(make_engine(model))
    plain.engine._graphs = None
    for client in (graphed, plain):
        for number, prompt in enumerate(prompts):
            client.ask(prompt, 3 + 9 * number, seed=number)
        client.finish()
    assert recorded
    check(model, graphed)
    for one, other in zip(graphed.asked, plain.asked, strict=True):
        assert one.ids == other.ids
    assert not any(arena[:, 0].any() for arena in graphed.engine._cache_tensors()), "block of zeros"


def test_a_size_is_recorded_once_and_serves_all_that_fit_into_it(recorded: list[Compute]) -> None:
    client = Client(make_engine(make_model()))
    for number in range(5):  # 6 rows of the ladder
        client.ask([number, 1, 2], 10)
    client.finish()
    assert len(recorded) == 1
    client.ask([9, 9], 10)  # one row
    client.finish()
    assert len(recorded) == 2
    for number in range(6):
        client.ask([number, 5], 10)
    client.finish()
    assert len(recorded) == 2


def test_a_step_that_is_too_large_is_not_recorded(
    recorded: list[Compute], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "_MAX_BLOCKS", 2)
    model = make_model()
    client = Client(make_engine(model))
    for number in range(3):
        client.ask([number, 1, 2], 10)
    client.finish()
    assert not recorded
    check(model, client)


def test_new_weights_need_no_new_record_and_a_sleep_does(recorded: list[Compute]) -> None:
    models = [make_model(seed=seed) for seed in (0, 1)]
    client = Client(make_engine(models[0]))
    client.one([1, 2, 3], 8)
    client.engine.stage(weights_of(models[1]), 1)
    client.engine.apply()
    client.asked.clear()
    client.one([1, 2, 4], 8)
    assert len(recorded) == 1
    check(models[1], client)
    client.engine.pause()
    client.engine.sleep()
    client.engine.wake()
    client.engine.resume()
    client.one([1, 2, 5], 8)
    assert len(recorded) == 2
    check(models[1], client)


def test_more_rows_than_the_largest_graph_are_computed_without_one(
    recorded: list[Compute], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decode_graphs, "_ROWS", [1, 2])
    model = make_model()
    client = Client(make_engine(model))
    for number in range(5):
        client.ask([number, 1, 2], 6)
    client.ask([7, 8], 9)
    client.finish()
    assert recorded
    check(model, client)
