"""Engines that give their memory back in the middle of calls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tailrace.config import ConfigError
from tailrace.device_turn import DeviceTurn
from tailrace.runtime import StopService
from tailrace_inference.adapters.engines import check_sleep
from tailrace_inference.adapters.sleeper import Sleeper
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.hf_engine import HfEngine
from tailrace_inference.ports import EngineFailedError, EngineFeatures
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


class FailingEngine:
    """An engine that does not come back."""

    async def pause(self) -> None:
        """Holds no calls."""

    async def sleep(self) -> None:
        """Has no memory."""

    async def wake(self) -> None:
        raise EngineFailedError("no memory is left")


async def test_a_server_whose_engine_does_not_wake_up_ends(tmp_path: Path) -> None:
    """Its calls are held: it would keep them, and say that it is ready."""
    learner, server = (DeviceTurn(tmp_path, "host", role) for role in ("learner", "server"))
    await server.take()
    sleeping = asyncio.create_task(Sleeper(FailingEngine(), server).run())  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await learner.take()
        learner.give()
        with pytest.raises(StopService, match="no memory is left") as stopped:
            await sleeping
    assert stopped.value.exit_code == 1
    for turn in (learner, server):
        await turn.aclose()


def test_the_statistics_that_another_thread_asks_for_change_nothing() -> None:
    """A list of rows that is remembered while the steps change it would be wrong from then on."""
    _, client = made("hf")
    asked = client.ask([3, 4, 5], 12)
    client.engine.step()
    batch = client.engine._batch
    batch._active = None
    assert client.engine.stats().used_tokens == len(asked.prompt) + 1
    assert batch._active is None


def test_a_sleep_gives_up_the_caches_that_a_model_keeps_itself() -> None:
    model = make_model()
    client = Client(make_engine(model, forward="rows"))
    engine = client.engine
    asked = client.ask([3, 4, 5], 12)
    for _ in range(5):
        engine.step()
    assert engine._model.forward._kept  # type: ignore[attr-defined]
    engine.pause()
    engine.sleep()
    assert not engine._model.forward._kept  # type: ignore[attr-defined]
    engine.wake()
    engine.resume()
    client.finish()
    wanted = own_logprobs(model, asked.ids)[-12:]
    np.testing.assert_allclose(asked.generation.inference_logprobs, wanted, atol=1e-4)
