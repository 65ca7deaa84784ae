"""One engine behind the protocol, a tiny model, and that model's own forward as the judge."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models
from transformers import AutoConfig, AutoModelForCausalLM

from tailrace.channel.generation import Generation, TokenBuffer
from tailrace.weights import TensorBytes
from tailrace_inference.adapters.engines import start_engine
from tailrace_inference.config import InferenceConfig
from tailrace_inference.ports import Engine
from tailrace_protos.base import pack_int32
from tailrace_protos.generation import GenerateRequest, Guide, SamplingParams, TokenChunk
from tailrace_protos.weights import ModelCard

ENGINE = os.environ.get("TAILRACE_ENGINE", "torch")
ENGINE_ARGS = json.loads(os.environ.get("TAILRACE_ENGINE_ARGS", "{}"))
ONE_GPU = torch.cuda.device_count() == 1
VOCAB_SIZE, EOS, MAX_LEN = 67, 2, 1024
LONG = 800  # new tokens of a call that still runs when a test that had to wait for a processor goes on
TOLERANCE = 2e-4  # of log-probabilities, between float32 kernels
DEADLINE_S = 240.0  # of a call; a vLLM that checks drafts on the CPU takes 12 for what it does in 2

MODEL: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}

TWO_NODES = {"num_nodes": 2, "tensor_parallel_size": 2, "max_running": 8, "kv_cache_tokens": 4096}


def text_of(ids: Iterable[int]) -> str:
    """Token i is the letter chr(33 + i)."""
    return "".join(chr(33 + i) for i in ids)


def make_card() -> ModelCard:
    tokenizer = Tokenizer(models.WordLevel({chr(33 + i): i for i in range(VOCAB_SIZE)}, unk_token="!"))
    tokenizer.decoder = decoders.Fuse()
    return ModelCard(json.dumps(MODEL).encode(), {"tokenizer.json": tokenizer.to_str().encode()})


def make_model(seed: int) -> Any:
    torch.manual_seed(seed)
    content = dict(MODEL)
    config = AutoConfig.for_model(content.pop("model_type"), **content)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for parameter in model.parameters():
        parameter.data.add_(0.05 * torch.randn_like(parameter))
    return model


def weights_of(model: Any) -> list[TensorBytes]:
    return [
        TensorBytes(name, "float32", tuple(p.shape), memoryview(p.detach().numpy()).cast("B"))
        for name, p in model.named_parameters()
    ]


def own_logprobs(model: Any, ids: Sequence[int], temperature: float = 1.0) -> NDArray[np.float32]:
    """Log-probabilities [T - 1, vocabulary] after each token, in the model's own forward."""
    with torch.no_grad():
        logits = model(torch.tensor([list(ids)])).logits[0].float()
    result: NDArray[np.float32] = torch.log_softmax(logits / temperature, -1)[:-1].numpy()
    return result


@dataclass
class Asked:
    """A request and what came back."""

    request: GenerateRequest
    prompt: list[int]
    buffer: TokenBuffer = field(default_factory=TokenBuffer)
    chunks: list[TokenChunk] = field(default_factory=list)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def on_chunk(self, chunk: TokenChunk) -> None:
        assert not self.ended.is_set(), "a chunk after the last one"
        assert self.buffer.add(chunk) == ""
        self.chunks.append(chunk)
        self.begun.set()
        if self.buffer.last is not None:
            self.ended.set()

    @property
    def generation(self) -> Generation:
        return self.buffer.generation()

    @property
    def new_ids(self) -> list[int]:
        return self.generation.token_ids.tolist()

    @property
    def ids(self) -> list[int]:
        return [*self.prompt, *self.new_ids]

    @property
    def error(self) -> Any:
        return self.buffer.last.error if self.buffer.last is not None else None

    def drift(self, model: Any, temperature: float = 1.0) -> NDArray[np.float32]:
        """Difference [T] of the reported log-probabilities from those of `model`."""
        own = own_logprobs(model, self.ids, temperature)[len(self.prompt) - 1 :]
        taken = np.take_along_axis(own, np.array(self.new_ids)[:, None], 1)[:, 0]
        return np.abs(taken - self.generation.inference_logprobs)

    def versions(self) -> list[int]:
        """Policy version [T] of each token."""
        return [span.policy_version for span in self.generation.spans for _ in range(span.num_tokens)]


class Bench:
    """An engine that serves one of two models, and its client."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.models = [make_model(0), make_model(1)]
        self.policy_version = -1
        self.arrived: list[TokenChunk] = []  # of all calls
        self._num_asked = 0

    @classmethod
    async def start(cls, **settings: Any) -> Bench:
        """Starts the engine that the environment names, with the first model as version 0."""
        limits = {
            "dtype": "float32",  # that of the judge, also on CUDA
            "max_running": 256,
            "kv_cache_tokens": 65536,
            "engine_args": ENGINE_ARGS,
        }
        config = InferenceConfig(engine=ENGINE, **(limits | settings))
        bench = cls(await start_engine(make_card(), config, sleeps=True))
        await bench.update()
        return bench

    async def __aenter__(self) -> Bench:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()  # a test that fails must leave no engine: pytest would wait for it

    @property
    def model(self) -> Any:
        """The model that is active."""
        return self.model_of(self.policy_version)

    def model_of(self, policy_version: int) -> Any:
        return self.models[policy_version % 2]

    async def update(self) -> None:
        """Makes the other model active, as the next version."""
        await self.stage()
        await self.swap()

    async def stage(self) -> None:
        """Stages the other model, as the next version."""
        version = self.policy_version + 1
        await self.engine.stage(iter(weights_of(self.model_of(version))), version)

    async def swap(self) -> None:
        """Makes the staged model active."""
        assert await self.engine.apply() >= 0
        self.policy_version += 1

    def ask(
        self,
        prompt: Sequence[int],
        num_new: int,
        *,
        episode: str = "",
        continued: int = 0,
        tops: int = 0,
        guide: Guide | None = None,
        **sampling: Any,
    ) -> Asked:
        self._num_asked += 1
        call_id = f"call-{self._num_asked}"
        request = GenerateRequest(
            call_id,
            episode or f"episode-of-{call_id}",
            pack_int32(list(prompt)),
            num_new,
            SamplingParams(**sampling),
            continued,
            top_logprobs=tops,
            guide=guide,
        )
        asked = Asked(request, list(prompt))

        def on_chunk(chunk: TokenChunk) -> None:
            self.arrived.append(chunk)
            asked.on_chunk(chunk)

        self.engine.submit(request, on_chunk)
        return asked

    async def one(self, prompt: Sequence[int], num_new: int, **options: Any) -> Asked:
        return await ended(self.ask(prompt, num_new, **options))


async def ended(asked: Asked) -> Asked:
    async with asyncio.timeout(DEADLINE_S):
        await asked.ended.wait()
    return asked


async def all_ended(many: Sequence[Asked]) -> None:
    await asyncio.gather(*(ended(asked) for asked in many))
