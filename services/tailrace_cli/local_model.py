"""A model directory behind the torch engine, in this process: for one episode in a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from tailrace.channel.generation import Generation, TokenLedger
from tailrace.config import ConfigError
from tailrace.sdk.policy import GenerationFailedError
from tailrace.weights import TensorBytes
from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.engine import TorchEngine
from tailrace_protos.base import Int32Bytes
from tailrace_protos.generation import GenerateRequest, SamplingParams, TokenChunk
from tailrace_protos.weights import ModelCard

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def read_model_card(folder: Path) -> ModelCard:
    """The model card of a Hugging Face model directory."""
    for name in ("config.json", "tokenizer.json"):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} is no model directory: it holds no {name}")
    files = {
        name: (folder / name).read_bytes() for name in TOKENIZER_FILES if (folder / name).is_file()
    }
    return ModelCard((folder / "config.json").read_bytes(), files)


class LocalPolicy:
    """Generates turns with an engine that only this process uses."""

    def __init__(self, folder: Path, card: ModelCard, config: InferenceConfig) -> None:
        tokenizer = Tokenizer.from_str(card.tokenizer_files["tokenizer.json"].decode())
        self._engine = TorchEngine.from_config_json(card.config_json, config, tokenizer)
        self._engine.stage(_read_weights(folder), 0)
        self._engine.apply()

    async def generate(
        self,
        prompt_ids: Int32Bytes,
        max_new_tokens: int,
        sampling: SamplingParams,
        *,
        episode_id: str,
        turn: int,
    ) -> Generation:
        """Continue the prompt; raises `GenerationFailedError` when the engine refuses it."""
        call_id = f"{episode_id}.{turn}"
        ledger = TokenLedger()
        last: list[TokenChunk] = []

        def on_chunk(chunk: TokenChunk) -> None:
            ledger.add(chunk)
            if chunk.finish_reason is not None or chunk.error is not None:
                last.append(chunk)

        self._engine.submit(
            GenerateRequest(call_id, episode_id, prompt_ids, max_new_tokens, sampling), on_chunk
        )
        while not last:
            self._engine.step()
        if last[0].error is not None:
            raise GenerationFailedError(call_id, 1, last[0].error.reason)
        return ledger.generation()


def _read_weights(folder: Path) -> Iterator[TensorBytes]:
    files = sorted(folder.glob("model*.safetensors"))  # a checkpoint has others beside them
    if not files:
        raise ConfigError(
            f"{folder} holds no model*.safetensors: save the model with safe serialization"
        )
    for path in files:
        with safe_open(path, framework="pt") as content:
            for name in content.keys():  # noqa: SIM118 - no mapping
                tensor = content.get_tensor(name).contiguous()
                raw = tensor.reshape(-1).view(torch.uint8).numpy().data
                yield TensorBytes(name, _dtype_name(tensor), tuple(tensor.shape), raw)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
