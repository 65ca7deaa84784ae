"""Arguments that vLLM gets on a device that this machine need not have."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace_inference.adapters.node_link import Node, Welcome
from tailrace_inference.config import InferenceConfig
from tests.contract.engine.harness import ENGINE, MAX_LEN, MODEL

pytestmark = pytest.mark.skipif(ENGINE != "vllm", reason="run by make test-engines")


class Cuda:
    """As much of vLLM's platform as the arguments need."""

    device_type = "cuda"


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace_inference.adapters.vllm_arguments.current_platform", Cuda)
    for name in ("VLLM_USE_V2_MODEL_RUNNER", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "0")


def arguments(content: dict[str, Any] | None = None, **settings: Any) -> Any:
    from tailrace_inference.adapters.vllm_arguments import engine_arguments

    return engine_arguments(
        InferenceConfig(engine="vllm", **settings),
        "folder",
        content or MODEL,
        max_len=MAX_LEN,
        max_logprobs=20,
        sleeps=True,
        node=Node(),
        welcome=Welcome(seed=0, port=0),
    )


def test_a_cache_of_a_given_size_asks_for_no_share_of_the_device(on_cuda: None) -> None:
    """vLLM refuses a device of which less is free, also where the cache's size is given."""
    made = arguments(kv_cache_tokens=4096)
    assert made.num_gpu_blocks_override >= 4096 // 16
    assert made.gpu_memory_utilization <= 0.05


def test_a_share_of_the_device_is_passed_on(on_cuda: None) -> None:
    made = arguments(gpu_memory_utilization=0.7)
    assert made.gpu_memory_utilization == 0.7
    assert made.num_gpu_blocks_override is None
    given = arguments(engine_args={"gpu_memory_utilization": 0.5})
    assert given.gpu_memory_utilization == 0.5


def test_an_accelerator_sleeps_and_compiles(on_cuda: None) -> None:
    made = arguments()
    assert made.enable_sleep_mode
    assert not made.enforce_eager
    assert made.enable_chunked_prefill is not False


@pytest.mark.parametrize("named", ["float32", "float16", "bfloat16"])
def test_auto_is_the_type_that_the_model_names(on_cuda: None, named: str) -> None:
    assert arguments(MODEL | {"dtype": named}).dtype == named
    assert arguments({"text_config": MODEL | {"torch_dtype": named}}).dtype == named
    assert arguments(MODEL | {"dtype": named}, dtype="float16").dtype == "float16"
    assert arguments(MODEL).dtype == "bfloat16"
