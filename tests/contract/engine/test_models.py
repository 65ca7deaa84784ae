"""Models whose weights have other names or shapes in checkpoints than in transformers' memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tailrace_inference.adapters.engine_checks import check_engine
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import EngineFailedError
from tests.contract.engine.harness import ENGINE, MAX_LEN, make_card
from tests.models.zoo import configuration

pytestmark = [
    pytest.mark.skipif(ENGINE not in ("vllm", "sglang"), reason="run by make test-engines"),
    pytest.mark.asyncio,
]
_ENGINE_SIZES: dict[str, Any] = {  # that the engines' kernels take
    "hidden_size": 128,
    "head_dim": 32,
    "max_position_embeddings": MAX_LEN,
    "moe_intermediate_size": 64,
    "intermediate_size": 128,
}
_CONFIG = InferenceConfig(engine=ENGINE, max_running=16, kv_cache_tokens=8192)


def write_checkpoint(name: str, folder: Path) -> Path:
    """Folder of a model of the zoo with random weights."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(configuration(name, **_ENGINE_SIZES), dtype=torch.float32)
    model.save_pretrained(folder)
    for file, content in make_card().tokenizer_files.items():
        (folder / file).write_bytes(content)
    return folder


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",  # the experts of a layer are one tensor in memory
        "mixtral",
        "gemma3",  # it sees too: a prefix before its text model's names
    ],
)
async def test_updates_reach_every_weight(name: str, tmp_path: Path) -> None:
    """Log-probabilities are those of the model, at the start and after another version."""
    checks = await check_engine(write_checkpoint(name, tmp_path), _CONFIG)
    assert {check.what for check in checks} >= {"log-probabilities", "weight swap"}
    assert [check for check in checks if check.reason] == []


@pytest.mark.skipif(ENGINE != "vllm", reason="vLLM's loader of this model")
async def test_a_model_whose_updates_vllm_would_lose_is_refused(tmp_path: Path) -> None:
    lost = "loads no update of 8 layers of GptOssForCausalLM.* take another engine"
    with pytest.raises(EngineFailedError, match=lost):
        await check_engine(write_checkpoint("gpt_oss", tmp_path), _CONFIG)
