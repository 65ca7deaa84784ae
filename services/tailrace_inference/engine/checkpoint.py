"""Engine from a model directory, for a process without a learner (`tailrace episode`)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from tailrace_inference.config import InferenceConfig
from tailrace_inference.engine.engine import TorchEngine


class CheckpointError(ValueError):
    """A model directory cannot be loaded; the message names it and the reason."""


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def engine_from_checkpoint(path: Path, config: InferenceConfig) -> TorchEngine:
    """Builds an engine with a Hugging Face directory's weights (as version 0) and tokenizer."""
    config_file, tokenizer_file = path / "config.json", path / "tokenizer.json"
    if not config_file.is_file():
        raise CheckpointError(f"{path} is not a model directory: it has no config.json")
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file.is_file() else None
    engine = TorchEngine.from_config_json(config_file.read_bytes(), config, tokenizer)
    load: Any = AutoModelForCausalLM.from_pretrained
    try:
        model = load(path, dtype=torch.float32, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"the weights in {path} cannot be loaded: {error}") from error
    engine.stage(_tensors(model), 0)
    engine.apply()
    engine.attach()
    return engine


def _tensors(model: torch.nn.Module) -> Iterator[_Tensor]:
    for name, tensor in model.state_dict().items():
        data = memoryview(tensor.float().contiguous().numpy()).cast("B")
        yield _Tensor(name, "float32", tuple(tensor.shape), data)
