"""Engines that give their memory back in the middle of calls."""

from __future__ import annotations

import numpy as np
import pytest

from tailrace.config import ConfigError
from tailrace_inference.adapters.engines import check_sleep
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.hf_engine import HfEngine
from tailrace_inference.ports import EngineFeatures
from tailrace_protos.generation import FinishReason
from tests.unit.tailrace_inference.harness import (
    Client,
    config_json,
    make_engine,
    make_model,
    own_logprobs,
    weights_of,
)


def made(name: str) -> tuple[object, Client]:
    model = make_model()
    if name == "torch":
        return model, Client(make_engine(model))
    engine = HfEngine(config_json(), InferenceConfig(max_running=8, stream_interval_ms=0))
    engine.stage(weights_of(model), 0)
    engine.apply()
    return model, Client(engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["torch", "hf"])
def test_a_call_goes_on_after_a_sleep_without_memory(name: str) -> None:
    model, client = made(name)
    engine = client.engine
    asked = [client.ask([3, 4, 5 + at], 12) for at in range(3)]
    for _ in range(5):
        engine.step()
    engine.pause()
    engine.sleep()
    weights = engine._weights.targets.values()
    assert not any(weight.untyped_storage().nbytes() for weight in weights)
    assert not any(cache.untyped_storage().nbytes() for cache in engine._cache_tensors())
    late = client.ask([9, 9], 4)
    engine.abort(asked[2].request.call_id)
    engine.step()
    assert asked[2].generation.finish_reason is FinishReason.ABORT
    assert not engine.has_work()
    engine.wake()
    engine.resume()
    client.finish()
    for one in (asked[0], asked[1], late):
        made_logprobs = one.generation.inference_logprobs
        assert len(made_logprobs) == one.request.max_new_tokens
        wanted = own_logprobs(model, one.ids)[-len(made_logprobs) :]
        np.testing.assert_allclose(made_logprobs, wanted, atol=1e-4)


def test_weights_staged_after_a_sleep_are_swapped_in_as_before() -> None:
    _, client = made("torch")
    engine = client.engine
    engine.pause()
    engine.sleep()
    engine.wake()
    engine.resume()
    newer = make_model(seed=5)
    engine.stage(weights_of(newer), 1)
    engine.apply()
    one = client.one([3, 4, 5], 8)
    wanted = own_logprobs(newer, one.ids)[-8:]
    np.testing.assert_allclose(one.generation.inference_logprobs, wanted, atol=1e-4)


def test_an_engine_without_sleep_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"^colocated: the engine my_module:Mine cannot"):
        check_sleep(InferenceConfig(engine="my_module:Mine"), EngineFeatures())
