"""Models of usual sizes with random weights, made on the device, and their weights as versions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.weights.pauses import Version
from tailrace.weights import TensorBytes
from tailrace_protos.weights import ModelCard

_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "dtype": "bfloat16",
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
}
SIZES: dict[str, dict[str, Any]] = {  # of the published Qwen3 models
    "0.6B": _QWEN3 | {"hidden_size": 1024, "intermediate_size": 3072},
    "1.7B": _QWEN3 | {"hidden_size": 2048, "intermediate_size": 6144},
}
VOCAB_SIZE: int = _QWEN3["vocab_size"]


def make_model(size: str, dtype: torch.dtype, attention: str = "sdpa") -> Any:
    """The model on the device."""
    torch.manual_seed(0)
    content = dict(SIZES[size])
    config = AutoConfig.for_model(str(content.pop("model_type")), **content)
    with torch.device("cuda"):
        make: Any = AutoModelForCausalLM.from_config
        return make(config, dtype=dtype, attn_implementation=attention)


def card_of(size: str) -> ModelCard:
    """The model's card, without a tokenizer."""
    return ModelCard(json.dumps(SIZES[size]).encode(), {})


def version_of(model: Any) -> Version:
    """The weights in bfloat16 in shared memory, as the learner publishes them."""
    tensors = []
    for name, weight in model.named_parameters():
        bits = weight.detach().to(torch.bfloat16).view(torch.int16).cpu().numpy()
        data = memoryview(np.ascontiguousarray(bits)).cast("B")
        tensors.append(TensorBytes(name, "bfloat16", tuple(weight.shape), data))
    return Version(tensors)


def held_gib() -> float:
    """Memory of the device that is in use, by all processes."""
    free, total = torch.cuda.mem_get_info()
    return float(total - free) / (1 << 30)
