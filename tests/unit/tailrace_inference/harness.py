"""Tiny models, and a client that drives an engine by hand and checks it against the model itself."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.channel.generation import Generation, TokenBuffer
from tailrace.weights import TensorBytes
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.engine import TorchEngine
from tailrace_protos.base import pack_int32
from tailrace_protos.generation import GenerateRequest, SamplingParams, TokenChunk

VOCAB_SIZE = 67

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen2": {},
    "llama": {"rope_parameters": LLAMA3_ROPE},
    "mistral": {"sliding_window": 7, "head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 9},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256},
}


def config_json(family: str = "qwen3") -> bytes:
    return json.dumps(BASE | FAMILIES[family] | {"model_type": family}).encode()


def make_model(family: str = "qwen3", seed: int = 0) -> Any:
    torch.manual_seed(seed)
    content = BASE | FAMILIES[family]
    config = AutoConfig.for_model(family, **content)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():  # norms and biases too: their defaults would hide mistakes
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model


def weights_of(model: Any) -> list[TensorBytes]:
    return [
        TensorBytes(name, "float32", tuple(p.shape), memoryview(p.detach().numpy()).cast("B"))
        for name, p in model.named_parameters()
    ]


def make_engine(model: Any, tokenizer: Tokenizer | None = None, **settings: Any) -> TorchEngine:
    """An engine of the same architecture with the model's weights as version 0."""
    family = model.config.model_type
    settings = {"max_running": 8, "kv_cache_tokens": 2048, "stream_interval_ms": 0} | settings
    engine = TorchEngine.from_config_json(config_json(family), InferenceConfig(**settings), tokenizer)
    engine.attach()
    engine.stage(weights_of(model), 0)
    engine.apply()
    return engine


def own_logprobs(model: Any, ids: Sequence[int], temperature: float = 1.0) -> NDArray[np.float32]:
    """Log-probabilities [T - 1] of `ids[1:]` in the model's own forward over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0].float()
    logprobs = torch.log_softmax(logits / temperature, -1)[:-1]
    taken: NDArray[np.float32] = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    return taken


@dataclass
class Asked:
    """A request and what came back."""

    request: GenerateRequest
    prompt: list[int]
    ledger: TokenBuffer = field(default_factory=TokenBuffer)
    chunks: list[TokenChunk] = field(default_factory=list)

    def on_chunk(self, chunk: TokenChunk) -> None:
        assert self.ledger.last is None, "a chunk after the last one"
        assert self.ledger.add(chunk) == ""
        self.chunks.append(chunk)

    @property
    def ended(self) -> bool:
        return self.ledger.last is not None

    @property
    def generation(self) -> Generation:
        return self.ledger.generation()

    @property
    def error(self) -> Any:
        return self.ledger.last.error if self.ledger.last is not None else None

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.generation.token_ids.tolist()]


class Client:
    """Submits to an engine and steps it."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self.asked: list[Asked] = []

    def ask(
        self,
        prompt: Sequence[int],
        num_new: int,
        *,
        episode: str = "",
        continued: int = 0,
        tops: int = 0,
        **sampling: Any,
    ) -> Asked:
        call_id = f"call-{len(self.asked)}"
        request = GenerateRequest(
            call_id,
            episode or f"episode-of-{call_id}",
            pack_int32(list(prompt)),
            num_new,
            SamplingParams(**sampling),
            continued,
            top_logprobs=tops,
        )
        asked = Asked(request, list(prompt))
        self.asked.append(asked)
        self.engine.submit(request, asked.on_chunk)
        return asked

    def finish(self) -> None:
        while self.engine.has_work():
            self.engine.step()
        assert all(asked.ended for asked in self.asked)

    def one(self, prompt: Sequence[int], num_new: int, **options: Any) -> Asked:
        asked = self.ask(prompt, num_new, **options)
        self.finish()
        return asked


def random_prompt(rng: np.random.Generator, low: int, high: int) -> list[int]:
    return rng.integers(0, VOCAB_SIZE, int(rng.integers(low, high + 1))).tolist()
