"""Quantized models: read as numbers that can be trained, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tailrace.config import ConfigError
from tailrace_learner.adapters import hf_model
from tests.unit.tailrace_learner.test_checkpoints import CONFIG, SCRATCH


def quantized(folder: Path, **settings: Any) -> dict[str, torch.Tensor]:
    """Writes a model whose configuration says so; returns its weights."""
    made = hf_model.make_model(SCRATCH, CONFIG, 3)
    made.model.save_pretrained(folder)
    made.tokenizer.save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    content["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(content))
    weights: dict[str, torch.Tensor] = load_file(folder / "model.safetensors")
    return weights


def test_float8_weights_are_trained_as_float32_where_a_gpu_would_compute_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left as they are they have no gradient."""
    weights = quantized(tmp_path, quant_method="fp8", weight_block_size=[128, 128])
    stored = dict(weights)
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        scale = weights[name].abs().max() / 400
        stored[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scale.reshape(1, 1)
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    gpu = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda: (9, 0))
    there = SimpleNamespace(**{**vars(torch), "cuda": gpu})
    monkeypatch.setattr("transformers.quantizers.quantizer_finegrained_fp8.torch", there)
    model = hf_model.load_model(str(tmp_path), CONFIG).model
    assert not hasattr(model.config, "quantization_config")
    for name, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32
        assert parameter.requires_grad
        assert (parameter - weights[name]).abs().max() <= 0.07 * weights[name].abs().max(), name


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_weights_that_stay_quantized_are_refused(method: str, tmp_path: Path) -> None:
    quantized(tmp_path, quant_method=method, bits=4)
    with pytest.raises(ConfigError, match=rf"^pretrain: .*quantized \({method}\) and cannot"):
        hf_model.load_model(str(tmp_path), CONFIG)
