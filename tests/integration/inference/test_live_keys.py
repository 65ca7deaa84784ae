"""Keys of the section `inference`: changing one changes where a real server steps and is reached."""

from __future__ import annotations

import threading

import pytest

from tailrace_inference.__main__ import build
from tailrace_inference.engine.engine import TorchEngine
from tests.integration.inference.world import SERVER_ID, World, address_of, make_model, own_logprobs
from tests.world.declared_types import rounded

FAST = {"max_running": 4, "kv_cache_tokens": 4096, "heartbeat_s": 0.1}
EVERYWHERE = {"bind_host": "0.0.0.0", "advertise_host": "localhost"}


@pytest.mark.parametrize(
    ("world", "in_loop", "host"),
    [
        ({**FAST, "step_in": "loop", "bind_host": "127.0.0.2"}, True, "127.0.0.2"),
        ({**FAST, "step_in": "thread", **EVERYWHERE}, False, "localhost"),
    ],
    indirect=["world"],
)
async def test_step_in_and_bind_host_and_advertise_host(
    world: World, in_loop: bool, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    steppers: set[bool] = set()
    step = TorchEngine.step

    def watched(engine: TorchEngine) -> None:
        steppers.add(threading.current_thread() is threading.main_thread())
        step(engine)

    monkeypatch.setattr(TorchEngine, "step", watched)
    world.services.serve("inference", build, SERVER_ID)
    await world.put_card()
    model = make_model(1)
    status = await world.serving(await world.publish(model))
    assert status.zmq_endpoint.startswith(f"tcp://{host}:")
    assert status.zmq_public_key, "not only loopback: encrypted"
    found = await world.generate(address_of(status), world.request("call", [5, 6, 7], 4))
    expected = own_logprobs(model, [5, 6, 7, *found.token_ids.tolist()], 4)
    assert found.inference_logprobs.tolist() == pytest.approx(expected, abs=1e-4)
    assert steppers == {in_loop}


@pytest.mark.parametrize(
    ("world", "weights_dtype"),
    [({**FAST, "weights_dtype": dtype}, dtype) for dtype in ("bfloat16", "float8_e4m3fn")],
    indirect=["world"],
)
async def test_weights_dtype(world: World, weights_dtype: str) -> None:
    world.services.serve("inference", build, SERVER_ID)
    await world.put_card()
    for seed in (1, 2):
        model = make_model(seed)
        status = await world.serving(await world.publish(model))
        found = await world.generate(address_of(status), world.request("call", [5, 6, 7], 8))
        ids = [5, 6, 7, *found.token_ids.tolist()]
        expected = own_logprobs(rounded(model, weights_dtype), ids, 8)
        assert found.inference_logprobs.tolist() == pytest.approx(expected, abs=1e-4)
        assert found.inference_logprobs.tolist() != pytest.approx(own_logprobs(model, ids, 8), abs=1e-4)
